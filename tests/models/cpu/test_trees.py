"""Trees of draft tokens in the compiled decoder: the bits of plain forwards, and nothing computed twice."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from backend_forwards import forward_tree
from cancel_flags import CancelAfter
from dsi.core.tree_shape import END, Tree
from dsi.models.cpu.decoder import LOGITS, CompiledDecoder, RowAnswers, TextPart
from dsi.models.cpu.linear import quantize_int8
from dsi.models.protocol import Cancelled, ForwardRequest, tree_path
from models.cpu.shapes import SHAPES, random_model

TOKENS = [int(token) for token in torch.randint(1, 97, (60,), generator=torch.Generator().manual_seed(1))]
CHAIN: Tree = tuple((i - 1, 10 + i) for i in range(8))


def random_tree(size: int, random: Random) -> Tree:
    """Mostly deep, with siblings everywhere; few tokens, so that some siblings are the same."""
    return tuple((max(END, i - random.choice((1, 1, 2, 5))), random.randrange(1, 30)) for i in range(size))


def plain_rows(
    decoder: CompiledDecoder, tokens: Sequence[int], start: int, tree: Tree, asked: Sequence[int]
) -> torch.Tensor:
    """The logits of a tree forward, text by text."""
    starts: list[tuple[Sequence[int], int]] = [(tokens, start)] if start <= len(tokens) else []
    for node in asked:
        text = [*tokens, *tree_path(tree, node)]
        starts.append((text, len(text)))
    return torch.cat([torch.empty(0, 97), *(decoder.forward(*each) for each in starts)])


class CountingDecoder(CompiledDecoder):
    """Counts the rows it computes."""

    rows = 0

    @cached_property
    def forwards(self) -> list[list[int]]:
        """The rows of each part of each forward."""
        return []

    def _run(self, parts: list[TextPart], answer: RowAnswers = LOGITS, at_once: int = 1) -> Any:
        self.rows += sum(len(part.tokens) for part in parts)
        self.forwards.append([len(part.tokens) for part in parts])
        return super()._run(parts, answer, at_once)

    def rows_of(self, *arguments: Any) -> int:
        before = self.rows
        forward_tree(self, *arguments)
        return self.rows - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_forward_gives_the_bits_of_plain_forwards(shape: str, dtype: str) -> None:
    model = random_model(shape, torch.float32 if dtype == "float32" else torch.bfloat16)
    model = quantize_int8(model) if dtype == "int8" else model
    plain, random = CompiledDecoder(model), Random(shape + dtype)
    for size, threads in ((1, 1), (7, 2), (20, 1), (40, 3)):
        end = random.randrange(1, len(TOKENS))
        tree, start = random_tree(size, random), random.randrange(1, end + 2)
        asked = random.sample(range(size), random.randrange(1, size + 1))
        expected = plain_rows(plain, TOKENS[:end], start, tree, asked)
        decoder = plain.with_threads(threads)
        for _ in range(2):  # the second time, all but what is asked about is cached
            assert torch.equal(forward_tree(decoder, TOKENS[:end], start, tree, asked), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_forward_gives_each_tree_the_bits_it_has_alone(shape: str, dtype: str) -> None:
    model = random_model(shape, torch.float32 if dtype == "float32" else torch.bfloat16)
    model = quantize_int8(model) if dtype == "int8" else model
    plain, random = CompiledDecoder(model, 16), Random(shape + dtype)
    requests = []
    for end, size, start in ((12, 9, 13), (30, 0, 25), (41, 20, 41), (12, 5, 12), (7, 1, 1)):
        text = TOKENS[size : size + end]
        tree, asked = random_tree(size, random), random.sample(range(size), random.randrange((size > 0), size + 1))
        requests.append(ForwardRequest(text, start, tree=tree, asked=asked))
    expected = [plain_rows(plain, request.tokens, request.start, request.tree, request.asked) for request in requests]
    for threads in (1, 3):
        packed = plain.with_threads(threads)
        for _ in range(2):  # the second time, all but what is asked about is cached
            for logits, rows in zip(packed.forward_packed(requests), expected):
                assert torch.equal(logits, rows)


@given(st.data())
@settings(max_examples=30)
def test_tree_forward_gives_the_same_bits_for_any_history(data: st.DataObject) -> None:
    """Several texts share forwards.

    Trees grow and are given up, texts go on along paths and elsewhere, are cut back, and forwards are cancelled.
    """
    random = data.draw(st.randoms(use_true_random=False))
    decoder = PLAIN.with_threads(random.choice((1, 2)))
    texts: list[tuple[list[int], Tree]] = [(TOKENS[:10], ()), (TOKENS[:10], ()), (TOKENS[5:20], ())]
    for _ in range(data.draw(st.integers(1, 10))):
        numbers = random.sample(range(3), random.randrange(1, 4))
        for i in numbers:
            texts[i] = changed(*texts[i], random)
        requests = []
        for text, tree in (texts[i] for i in numbers):
            asked = random.sample(range(len(tree)), random.randrange(len(tree) + 1))
            start = max(1, len(text) + random.randrange(-3, 2))
            requests.append(ForwardRequest(text, start, tree=tree, asked=asked))
        if random.random() < 0.1:
            [cancelled, *_] = requests
            flag = CancelAfter(random.randrange(3))
            with pytest.raises(Cancelled):
                decoder.forward_packed([replace(cancelled, tokens=[*cancelled.tokens, 5], cancelled=flag)])
        for request, logits in zip(requests, decoder.forward_packed(requests)):
            expected = plain_rows(PLAIN, request.tokens, request.start, request.tree, request.asked)
            assert torch.equal(logits.reshape(-1, 97), expected)


def changed(text: list[int], tree: Tree, random: Random) -> tuple[list[int], Tree]:
    """A text and its tree after the next step."""
    action = random.choice(("grow", "grow", "accept", "accept", "new", "sibling", "other", "cut"))
    if action == "grow" and len(tree) < 40:
        tree = grown(tree, random)
    elif action in ("accept", "new") and tree:
        text, tree = accepted(text, tree, random.randrange(len(tree)), random)
        text = [*text, random.randrange(1, 97)] if action == "new" else text
    elif action == "sibling":
        text = [*text[:-1], random.randrange(1, 97)]
    elif action == "other":
        text, tree = [*text[: max(1, len(text) - random.randrange(9))], random.randrange(1, 97)], ()
    elif action == "cut":
        text, tree = text[: random.randrange(1, len(text) + 1)], ()
    return text, tree


PLAIN = CompiledDecoder(random_model("gemma3", sliding_window=5))


def grown(tree: Tree, random: Random) -> Tree:
    """With new leaves anywhere."""
    return (*tree, *((random.randrange(END, len(tree)), random.randrange(1, 30)) for _ in range(random.randrange(6))))


def accepted(text: list[int], tree: Tree, node: int, random: Random) -> tuple[list[int], Tree]:
    """The text along a path, and either the tree below its end or nothing."""
    numbers, below = {node: END}, list[tuple[int, int]]()
    for i, (parent, token) in enumerate(tree):
        if parent in numbers and i != node:
            numbers[i] = len(below)
            below.append((numbers[parent], token))
    return [*text, *tree_path(tree, node)], tuple(below) if random.random() < 0.7 else ()


def test_accepted_path_is_not_recomputed() -> None:
    decoder = CountingDecoder(random_model("mistral"))
    tree: Tree = ((END, 5), (END, 6), (0, 7), (1, 8), (1, 9), (4, 10), (5, 11))
    assert decoder.rows_of(TOKENS[:20], 20, tree, range(7)) == 27
    text = [*TOKENS[:20], 6, 9, 10]
    assert decoder.rows_of(text, 24, ((END, 11), (0, 12)), [1]) == 1  # 11 is cached, too
    assert decoder.rows_of([*text, 11, 12, 13], 26, (), []) == 1
    assert torch.equal(
        decoder.forward([*text, 11, 12, 13], 1), CompiledDecoder(decoder.model).forward([*text, 11, 12, 13], 1)
    )


def test_tree_is_not_that_of_another_text_of_the_same_length() -> None:
    decoder = CountingDecoder(random_model("llama"))
    forward_tree(decoder, TOKENS, 60, CHAIN, [7])
    text = [*TOKENS[:-1], 3]
    expected = plain_rows(CompiledDecoder(decoder.model), text, 61, CHAIN, [7])
    assert torch.equal(forward_tree(decoder, text, 61, CHAIN, [7]), expected)


def test_plain_forward_after_a_tree_keeps_the_accepted_path() -> None:
    decoder = CountingDecoder(random_model("llama"))
    forward_tree(decoder, TOKENS[:20], 20, ((END, 5), (END, 6), (1, 7)), [0, 1, 2])
    before, text = decoder.rows, [*TOKENS[:20], 6, 7, 8]
    logits = decoder.forward(text, 23)
    assert decoder.rows - before == 1
    assert torch.equal(logits, CompiledDecoder(decoder.model).forward(text, 23))


def test_tree_grown_level_by_level_computes_each_node_once() -> None:
    decoder = CountingDecoder(random_model("qwen3"))
    tree: Tree = ((END, 5), (END, 6), (0, 7), (0, 8), (1, 7), (2, 9), (4, 9))
    whole = forward_tree(CompiledDecoder(decoder.model), TOKENS, 60, tree, range(7))
    rows = [decoder.forward(TOKENS, 60)]
    for first, last in ((0, 2), (2, 5), (5, 7)):
        before = decoder.rows
        rows.append(forward_tree(decoder, list(TOKENS), 61, tree[:last], range(first, last)))
        assert decoder.rows - before == last - first
    assert torch.equal(torch.cat(rows), whole)


def test_tree_forward_skips_nodes_that_nothing_is_asked_below() -> None:
    decoder = CountingDecoder(random_model("llama"))
    tree: Tree = ((END, 5), (END, 6), (0, 7), (2, 8), (1, 9))
    assert decoder.rows_of(TOKENS, 61, tree, [3]) == 60 + 3


def test_tree_never_shares_a_forward_with_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsi.models.cpu.decoder.MAX_ROWS", 17)
    decoder = CountingDecoder(random_model("llama"))
    tree: Tree = ((END, 5), (END, 6), (0, 7))
    expected = plain_rows(CompiledDecoder(decoder.model), TOKENS, 60, tree, [0, 1, 2])
    assert torch.equal(forward_tree(decoder, TOKENS, 60, tree, range(3)), expected)
    assert decoder.forwards == [[17], [17], [17], [9 + 3]]
    decoder.clear_cache()
    tree = tuple((END, token) for token in range(1, 11))
    forward_tree(decoder, TOKENS, 60, tree, range(10))
    assert decoder.forwards[4:] == [[17], [17], [17], [9], [10]]


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_cancelled_tree_forward_leaves_nothing(checks: int) -> None:
    decoder = CountingDecoder(random_model("llama"))
    forward_tree(decoder, TOKENS[:30], 30, CHAIN, [7])
    with pytest.raises(Cancelled):
        forward_tree(decoder, TOKENS[:30], 31, (*CHAIN, (7, 3)), [8], CancelAfter(checks))
    assert decoder.rows_of(TOKENS[:30], 31, CHAIN, [7]) == 8
    assert torch.equal(
        forward_tree(decoder, TOKENS[:30], 31, CHAIN, [7]),
        plain_rows(CompiledDecoder(decoder.model), TOKENS[:30], 30, CHAIN, [7])[1:],
    )


def test_tree_cache_grows_with_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsi.models.kv_sequence.GROWTH", 0)
    decoder = CountingDecoder(random_model("gemma2"))
    expected = plain_rows(CompiledDecoder(decoder.model), TOKENS, 60, CHAIN, list(range(8)))[1:]
    for node in range(8):
        row = forward_tree(decoder, TOKENS, 61, CHAIN[: node + 1], [node])
        assert torch.equal(row[0], expected[node])
    assert decoder.rows == 60 + 8


def test_tree_cache_drops_branches_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsi.models.tree_cache.MAX_NODES", 4)
    decoder = CountingDecoder(random_model("llama"))
    counts = [decoder.rows_of(TOKENS, 61, ((END, i), (0, 9)), [1]) for i in (1, 2, 3, 3)]
    assert counts == [62, 2, 2, 1]


def test_tree_after_a_long_text_takes_several_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = CompiledDecoder(random_model("gemma2"))
    tree = random_tree(12, Random(3))
    expected = plain_rows(decoder, TOKENS, 30, tree, list(range(12)))
    monkeypatch.setattr("dsi.models.cpu.decoder.MAX_ROWS", 17)
    decoder.clear_cache()
    assert torch.equal(forward_tree(decoder, TOKENS, 30, tree, range(12)), expected)


def test_tree_forward_refuses_paths_beyond_the_context() -> None:
    decoder = CompiledDecoder(random_model("llama", max_position_embeddings=64))
    with pytest.raises(ValueError, match="a text of 68 tokens: the model's context is 64"):
        forward_tree(decoder, TOKENS, 60, CHAIN, [7])
    tree: Tree = tuple((END, i) for i in range(20))
    assert forward_tree(decoder, TOKENS, 60, tree, range(20)).shape == (21, 97)
