from hypothesis import given, strategies as st

from dsi.core.sequence import TokenSequence

texts = st.lists(st.integers(0, 2), max_size=12)


def grown(prompt: list[int], tail: list[int]) -> TokenSequence:
    text = TokenSequence.of(prompt)
    for token in tail:
        text = text.then(token)
    return text


def test_token_sequence_then_leaves_its_parent_unchanged() -> None:
    prompt = TokenSequence.of((1, 2))
    longer = prompt.then(3).then(4)
    assert (tuple(prompt), tuple(longer)) == ((1, 2), (1, 2, 3, 4))
    assert (len(prompt), len(longer), longer.origin is prompt) == (2, 4, True)
    assert repr(longer) == "TokenSequence(1, 2, 3, 4)"


def test_token_sequence_since_reads_only_the_tail() -> None:
    text = grown([1, 2, 3], [4, 5])
    assert [text.since(n) for n in (0, 2, 3, 4, 5)] == [[1, 2, 3, 4, 5], [3, 4, 5], [4, 5], [5], []]


@given(texts, texts, texts)
def test_token_sequence_common_prefix_within_a_request(prompt: list[int], a: list[int], b: list[int]) -> None:
    origin = TokenSequence.of(prompt)
    first, second = origin, origin
    for token in a:
        first = first.then(token)
    for token in b:
        second = second.then(token)
    together = 0
    while together < min(len(a), len(b)) and a[together] == b[together]:
        together += 1
    assert first.common_prefix(second) == second.common_prefix(first) == len(prompt) + together


@given(texts, texts, texts, texts)
def test_token_sequence_common_prefix_across_requests(p: list[int], a: list[int], q: list[int], b: list[int]) -> None:
    first, second = p + a, q + b
    together = 0
    while together < min(len(first), len(second)) and first[together] == second[together]:
        together += 1
    assert grown(p, a).common_prefix(grown(q, b)) == together


def test_token_sequence_handles_long_texts() -> None:
    text = grown([], list(range(50_000)))
    assert text.since(49_998) == [49_998, 49_999]
    assert len(list(text)) == 50_000
    del text
