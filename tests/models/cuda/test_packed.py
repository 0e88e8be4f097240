"""Forwards of several texts with their keys and values in slots, in torch on the CPU: only graphs need a GPU."""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, count, repeat
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dsi.core.messages import Draft, DraftedLevel, Sampling, Verified, Verify
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.tree_shape import END, Level, Tree, best_paths, rank_chances
from dsi.fleets.packed import PackedForward as SharedForward, PackedServer
from dsi.fleets.servers import Server
from dsi.models.cuda.kv_pool import EVICTED, NoRoom, SlotPool, TextPool
from dsi.models.cuda.packed import PackedCudaModel, PackedForward
from dsi.models.cuda.packed_rows import BRANCHES, ROWS, SlotRows, node_paths, num_parts, tree_parts
from dsi.models.protocol import ForwardRequest, SamplingModel, run_to_end, tree_path

InFlight = tuple[SharedForward, Generator[Any, None, None]]
MAX_LENGTH, VOCAB_SIZE = 192, 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
}
PHI3 = {**SIZES, "hidden_size": 128, "pad_token_id": 0, "original_max_position_embeddings": MAX_LENGTH}
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=70),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "phi3": lambda: hf.Phi3Config(**{name: size for name, size in PHI3.items() if name != "head_dim"}),
    "bigcode": lambda: hf.GPTBigCodeConfig(n_layer=2, n_head=4, n_embd=128, n_positions=MAX_LENGTH, vocab_size=97),
}
TREE: Tree = ((END, 5), (END, 6), (0, 7), (1, 7), (2, 8), (0, 9), (4, 3))


def random_model(name: str = "llama") -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model()


def plain_logits(model: Any, request: ForwardRequest) -> Tensor:
    """One row for each position and node that is asked about, text by text and without a cache."""
    with torch.inference_mode():
        tokens = list(request.tokens)
        rows = [model(torch.tensor([tokens])).logits[0, request.start - 1 :]] if request.start <= len(tokens) else []
        paths = [[*tokens, *tree_path(request.tree, node)] for node in request.asked]
        return torch.cat([*rows, *(model(torch.tensor([path])).logits[0, -1:] for path in paths)])


def check(model: Any, packed: PackedCudaModel, requests: list[ForwardRequest]) -> None:
    for request, logits in zip(requests, packed.forward_packed(requests), strict=True):
        if request.num_positions:
            expected = plain_logits(model, request)
            assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))
        else:
            assert not logits.numel()


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_packed_gives_the_logits_of_each_text_alone(name: str) -> None:
    """New texts, texts that go on, a tree, the path of it that becomes text and the tree that goes on from there."""
    model = random_model(name)
    packed = PackedCudaModel(model, MAX_LENGTH, 600)
    texts = [Random(i).choices(range(1, VOCAB_SIZE), k=length) for i, length in enumerate((5, 62, 130))]
    check(model, packed, [ForwardRequest(text, len(text) - i) for i, text in enumerate(texts)])
    check(
        model, packed, [ForwardRequest([*texts[0], 3, 4], 6), ForwardRequest(texts[1], 62, tree=TREE, asked=range(7))]
    )
    grown: Tree = ((END, 8), (0, 3), (0, 4), (2, 11))
    accepted = [*texts[1], 5, 7]
    check(model, packed, [ForwardRequest(accepted, 65, tree=grown, asked=(2, 3)), ForwardRequest(texts[2][:100], 101)])
    assert packed.pool.num_new(ForwardRequest([*accepted, 8, 4], 66)) == 2
    check(model, packed, [ForwardRequest([*accepted, 8, 4], 66)])


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_forward_packed_computes_any_texts_in_any_order(llama: Any, data: st.DataObject) -> None:
    """With so few slots and tables that texts drop each other."""
    packed = PackedCudaModel(llama, MAX_LENGTH, 64, max_texts=3, sizes=(4, 16))
    texts = [[1, 2], [1, 2, 3], [7]]
    for _ in range(data.draw(st.integers(1, 6))):
        requests = []
        for i in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
            kept = data.draw(st.integers(1, len(texts[i])))
            new = data.draw(st.lists(st.integers(1, 4), max_size=6))
            texts[i] = [*texts[i][:kept], *new][:20]
            asked = data.draw(st.lists(st.integers(0, 3), unique=True, max_size=4))
            tree: Tree = ((END, 1), (END, 2), (0, 3), (2, data.draw(st.integers(1, 4))))
            start = data.draw(st.integers(max(1, len(texts[i]) - 4), len(texts[i]) + 1))
            requests.append(ForwardRequest(texts[i], start, tree=tree if asked else (), asked=sorted(asked)))
        check(llama, packed, requests)
    packed.pool.clear()
    assert packed.pool.slots.num_free == 64


def test_sampled_rows_of_several_texts_are_drawn_at_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices, of texts and of trees, with different seeds and settings."""
    model = SamplingModel(PackedCudaModel(llama, MAX_LENGTH, 200))
    samplings = (Sampling(0.8, seed=3), Sampling(0.8, seed=4), Sampling(1.3, 20, min_p=0.01), Sampling(0.9, top_p=0.8))
    requests = [
        ForwardRequest([i + 1, 5, 9], 2, sampling=sampling, tree=TREE[:i], asked=range(i))
        for i, sampling in enumerate((*samplings, Sampling()))
    ]
    one_by_one = model.answer_packed(requests)
    monkeypatch.setattr("dsi.sampling.logits._is_on_device", lambda logits: True)  # noqa: ARG005
    assert model.answer_packed(requests) == one_by_one
    assert len({answer.tokens for answer in one_by_one}) == len(requests)


def test_greedy_answers_are_picked_without_reading_logits(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts, trees, drafts, and prompts of several forwards; the next forward does not change them."""
    texts = [Random(i).choices(range(1, VOCAB_SIZE), k=length) for i, length in enumerate((5, 62, 30))]
    requests = [
        ForwardRequest(texts[0], 4),
        ForwardRequest(texts[1], 62, tree=TREE, asked=(2, 0, 6)),
        ForwardRequest(texts[1][:50], 51, tree=TREE[:2], asked=(1,), num_children=(3,)),
        ForwardRequest(texts[2], 2),
        ForwardRequest(texts[2][:9], 10),
        ForwardRequest([*texts[0], 8], 6, 5),  # says how much of it is cached...
        ForwardRequest([7, 7, 7], 3, 2),  # ...wrongly
    ]
    monkeypatch.setattr(PackedCudaModel, "max_picked", 0)
    by_logits = [SamplingModel(PackedCudaModel(llama, MAX_LENGTH, 400)).answer_tree(request) for request in requests]
    monkeypatch.undo()
    packed = PackedCudaModel(llama, MAX_LENGTH, 400, sizes=(1, 16))
    monkeypatch.setattr(packed, "_logits_of", None)
    model = SamplingModel(packed)
    assert model.answer_packed(requests) == by_logits
    assert [model.answer_tree(request) for request in requests] == by_logits
    few = [ForwardRequest([7, 7], 2, 1), ForwardRequest([8, 8], 2, 1)]  # in one forward, in the device's order
    assert model.answer_packed(few) == list(map(model.answer_tree, few))
    drafts = [ForwardRequest(texts[0], 5, num_children=(BRANCHES + 1,))]
    with pytest.raises(TypeError):
        model.answer_packed(drafts)  # more than are picked


def test_forward_packed_reads_long_prompts_in_several_forwards(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 600, sizes=(1, 16))
    text = Random(3).choices(range(1, VOCAB_SIZE), k=70)
    check(llama, packed, [ForwardRequest(text, 1), ForwardRequest(text[:40], 40), ForwardRequest(text[5:], 66)])
    check(llama, packed, [ForwardRequest(text[:20], 20, tree=TREE, asked=range(7))])


def test_forward_packed_takes_more_texts_than_there_are_tables(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 400, max_texts=3)
    first = Random(5).choices(range(1, VOCAB_SIZE), k=50)
    packed.forward_packed([ForwardRequest(first, 50)])
    check(llama, packed, [ForwardRequest([*first[:10], i, 7], 11) for i in range(5)])
    check(llama, packed, [ForwardRequest([i, 7], 1) for i in range(5)])


def rows_of_texts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each text, by forward, from now on."""
    forwards, fill = list[list[int]](), PackedForward.fill

    def recorded(self: PackedForward, texts: Sequence[SlotRows], *arguments: Any, **named: Any) -> None:
        forwards.append([text.num_rows for text in texts])
        fill(self, texts, *arguments, **named)

    monkeypatch.setattr(PackedForward, "fill", recorded)
    return forwards


def test_texts_that_a_call_uses_are_not_dropped_for_one_another(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slots do not suffice for all, it takes several forwards."""
    packed = PackedCudaModel(llama, MAX_LENGTH, 64)
    texts = [Random(i).choices(range(1, VOCAB_SIZE), k=20) for i in range(3)]
    check(llama, packed, [ForwardRequest(text, 20) for text in texts])
    forwards = rows_of_texts(monkeypatch)
    longer = [[*text, 1, 2, 3, 4] for text in texts]
    check(llama, packed, [ForwardRequest(text, 21) for text in longer])
    assert forwards == [[4], [4, 4]]
    check(llama, packed, [ForwardRequest(text, 24) for text in longer])
    assert sum(map(sum, forwards[2:])) <= 24 + 24 + 1  # even now not all are read again
    packed.pool.clear()
    assert packed.pool.slots.num_free == 64


def test_texts_that_a_call_does_not_use_lose_their_ends(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used first, not those of later requests."""
    packed = PackedCudaModel(llama, MAX_LENGTH, 250)
    *others, oldest, newer = (Random(i).choices(range(1, VOCAB_SIZE), k=k) for i, k in enumerate((20, 20, 20, 130, 60)))
    for text in (*others, oldest, newer):
        packed.forward_packed([ForwardRequest(text, len(text))])
    forwards = rows_of_texts(monkeypatch)
    check(llama, packed, [ForwardRequest([*text, 1, 2, 3, 4], 25) for text in others])
    check(llama, packed, [ForwardRequest(oldest, 130), ForwardRequest(newer, 60)])
    assert forwards == [[4, 4, 4], [EVICTED, 1]]


def test_forward_packed_computes_as_many_texts_at_once_as_it_says(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each begins like another that is cached."""
    packed = PackedCudaModel(llama, MAX_LENGTH, 600, max_texts=4)
    texts = [Random(i).choices(range(1, VOCAB_SIZE), k=40) for i in range(4)]
    packed.forward_packed([ForwardRequest(text, 40) for text in texts])
    forwards = rows_of_texts(monkeypatch)
    check(llama, packed, [ForwardRequest([*text[:5], 3], 6) for text in texts])
    assert forwards == [[1] * 4]


def test_forward_packed_computes_a_tree_that_is_larger_than_a_forward(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 200, sizes=(1, 8))
    forwards = rows_of_texts(monkeypatch)
    wide: Tree = (*TREE, *((node, 20 + node) for node in range(4)))
    check(llama, packed, [ForwardRequest([5, 3, 9], 2, tree=wide, asked=range(len(wide)))])
    assert max(map(sum, forwards)) <= 8
    deep = tuple((node - 1, 7) for node in range(8))
    with pytest.raises(ValueError, match="a tree of 8 draft tokens: a forward has 8 rows"):
        packed.forward_packed([ForwardRequest([5, 3, 9], 3, tree=deep, asked=(7,))])


def test_what_is_cached_is_answered_on_the_device_of_the_model(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 200)
    packed.forward_packed([ForwardRequest([1, 2], 2)])
    packed.device = torch.device("meta")
    [logits] = packed.forward_packed([ForwardRequest([1, 2], 3)])
    assert logits.device.type == "meta"


def test_texts_share_the_slots_of_their_common_prefix(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 200)
    text = Random(4).choices(range(1, VOCAB_SIZE), k=100)
    packed.forward_packed([ForwardRequest(text, 100)])
    check(llama, packed, [ForwardRequest([*text[:60], 3, 9], 61), ForwardRequest([*text, 5], 101)])
    assert packed.pool.slots.num_free == 200 - 101 - 2
    packed.pool.clear()
    assert packed.pool.slots.num_free == 200


def test_slots_are_free_once_no_text_uses_them() -> None:
    slots = SlotPool(5)
    text = np.array(slots.take(3))
    slots.share(text[:2])
    assert slots.used_once(text).tolist() == [2]
    slots.give_back(text)
    assert slots.num_free == 3
    slots.give_back(text[:2])
    slots.free(slots.take(2))
    assert sorted(slots.take(slots.num_free)) == [0, 1, 2, 3, 4]


def test_nodes_that_are_cached_are_not_computed_again(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 200)
    text = [3, 1, 4, 1, 5]
    packed.forward_packed([ForwardRequest(text, 5, tree=TREE, asked=(0, 1))])
    [begun] = packed.pool.begin([ForwardRequest(text, 6, tree=TREE, asked=(2, 3))])
    assert (begun.rows.num_rows, begun.rows.tree.tokens, begun.wanted) == (2, [7, 7], [0, 1])
    packed.pool.cancel([begun])
    assert packed.pool.slots.num_free == 195


def grow(packed: PackedCudaModel, request: ForwardRequest, levels: Sequence[Level]) -> list[tuple[Tokens, ...]]:
    return [children for children in packed.poll_levels(request, levels) if children is not None]


@pytest.mark.parametrize("name", ["llama", "bigcode"])
def test_poll_levels_grows_the_tree_that_forwards_one_by_one_do(name: str) -> None:
    """From the end of a text, then from the nodes of a tree; what it has cached is used by the text that goes on."""
    model = random_model(name)
    packed = PackedCudaModel(model, MAX_LENGTH, 400, drafts=True)
    one_by_one = SamplingModel(PackedCudaModel(model, MAX_LENGTH, 400))
    text = Random(6).choices(range(1, VOCAB_SIZE), k=62)
    first = ForwardRequest(text, len(text), num_children=(3,)), [[(0, 2), (2, 1)], [(3, 1), (4, 3)], [(9, 2)]], 4
    for step in range(3):
        request, levels, leaf = first
        if step:  # nodes that are not cached
            request = ForwardRequest(text, len(text) + 1, tree=TREE[:2], asked=(0, 1), num_children=(2, 1))
            levels, leaf = [[(2, 2), (4, 1)], [(5, 4)]], 5
        assert packed.can_grow(request, levels)
        tree = list(request.tree)
        expanded = [[END] if not step else [0, 1], *([node for node, _ in level] for level in levels)]
        counts = [request.num_children, *([count for _, count in level] for level in levels)]
        for nodes, num_children, children in zip(expanded, counts, grow(packed, request, levels), strict=True):
            own = tuple(node for node in nodes if node != END)
            start = len(text) + (END not in nodes)
            alone = ForwardRequest(text, start, tree=tuple(tree), asked=own, num_children=num_children)
            assert one_by_one.answer_tree(alone).children == children
            for node, tokens in zip(nodes, children):
                tree += [(node, token) for token in tokens]
        text = [*text, *tree_path(tuple(tree), leaf), 3]
        [begun] = packed.pool.begin([ForwardRequest(text, len(text))])
        packed.pool.cancel([begun])
        assert begun.rows.num_rows == 1  # the path that the tree had is cached
        check(model, packed, [ForwardRequest(text, len(text))])
    packed.pool.clear()
    assert packed.pool.slots.num_free == 400


def test_poll_levels_gives_its_slots_back_when_it_is_given_up(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 100, drafts=True)
    steps = packed.poll_levels(ForwardRequest([1, 2, 3], 3, num_children=(2,)), [[(0, 1)], [(2, 1)]])
    assert next(steps) is not None
    steps.close()
    packed.pool.clear()
    assert packed.pool.slots.num_free == 100


def test_a_forward_that_is_given_up_gives_its_slots_back(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 100)

    class Computing:
        def query(self) -> bool:
            return False

    monkeypatch.setattr(PackedCudaModel, "_end", lambda _: Computing())
    steps = packed.poll_picked([ForwardRequest([1, 2, 3], 3), ForwardRequest([4, 5], 2, tree=TREE, asked=(2,))])
    assert next(steps) is None
    assert packed.pool.slots.num_free == 100 - 3 - 4
    steps.close()
    monkeypatch.undo()
    check(llama, packed, [ForwardRequest([4, 5], 2), ForwardRequest([1, 2, 3], 3)])
    packed.pool.clear()
    assert packed.pool.slots.num_free == 100


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_tree_parts_give_each_node_a_path_that_its_part_has(data: st.DataObject) -> None:
    """Of some nodes of any tree, behind tokens, with any number of queries that read one key."""
    parents: tuple[int, ...] = ()
    for node in range(data.draw(st.integers(1, 40))):
        parents += (data.draw(st.integers(max(END, node - 9), node - 1)),)
    nodes = tuple(sorted(data.draw(st.sets(st.integers(0, len(parents) - 1), min_size=1))))
    groups, token_queries = data.draw(st.integers(1, 40)), data.draw(st.integers(0, ROWS - 1))
    parts, paths = tree_parts(parents, nodes, token_queries, groups), node_paths(parents)
    assert sorted(parts.order.tolist()) == list(range(len(nodes)))
    assert len(set(parts.nodes.tolist())) == len(parts.nodes) <= len(nodes)
    steps = zip(*(array.tolist() for array in parts.paths))
    assert list(steps) == [
        (i, depth, step) for i, leaf in enumerate(parts.nodes) for depth, step in enumerate(paths[leaf])
    ]
    order = [nodes[row] for row in parts.order]
    queries = [END] * token_queries + [node for node in order for _ in range(groups)]
    assert len(parts.leaves) == len(parts.tables) == len(parts.lengths) == len(parts.seen) == num_parts(len(queries), 1)
    for number, (leaves, tables, lengths, seen) in enumerate(
        zip(parts.leaves.tolist(), parts.tables.tolist(), parts.lengths, parts.seen)
    ):
        own = queries[number * ROWS : (number + 1) * ROWS]
        of_part = [int(parts.nodes[table]) for table in tables[: len(lengths)]]
        assert set(of_part) <= set(own)
        assert not any(a != b and a in paths[b] for a in of_part for b in of_part)
        assert list(lengths) == sorted((len(paths[leaf]) for leaf in of_part), reverse=True)
        for node, leaf in zip(own, leaves):
            assert node in (END, *paths[of_part[leaf]])
        rows = [nodes.index(step) for leaf in of_part for step in paths[leaf] if step in nodes]
        assert seen == max(rows) + 1


@pytest.mark.parametrize(
    ("acceptance", "size", "leaves"),
    [
        (0.63, 15, [6]),
        (0.63, 31, [5, 6]),
        (0.63, 63, [6, 6, 5, 6]),
        (0.8, 31, [5, 5]),
        (0.8, 63, [5, 5, 4, 3]),
        (0.93, 63, [5, 5, 4, 3]),
    ],
)
def test_best_trees_have_few_leaves_in_a_part(acceptance: float, size: int, leaves: list[int]) -> None:
    """Each of which is a tile of keys, beside the first token of the tree."""
    nodes = sorted((path for path, _ in best_paths(rank_chances(acceptance, 0.5, 3), size, 8)), key=len)
    parents = tuple(nodes.index(path[:-1]) if path[:-1] else END for path in nodes)
    assert list(map(len, tree_parts(parents, tuple(range(size)), 1, 1).lengths)) == leaves


def test_can_grow_knows_its_limits(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 100, sizes=(1, 8), drafts=True)
    request = ForwardRequest([1, 2, 3], 3, num_children=(2,))
    assert packed.can_grow(request, [[(0, 1)]])
    assert not packed.can_grow(request, [[(0, BRANCHES + 1)]])
    assert not packed.can_grow(request, [[(i, 1)] for i in range(8)])
    assert not packed.can_grow(ForwardRequest([1] * 9, 9, num_children=(2,)), [[(0, 1)]])
    assert not PackedCudaModel(llama, MAX_LENGTH, 100).can_grow(request, [[(0, 1)]])
    assert not packed.can_grow(ForwardRequest([1] * 9, 10), [[(0, 1)]])  # a chunk of a prompt has no children


def test_a_tree_grows_level_by_level_where_less_of_its_text_is_cached_than_was_said(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 100, sizes=(1, 8), drafts=True)
    server, text = PackedServer(Server("drafter", "drafter", model := SamplingModel(packed)), model), [1, 2, 3] * 3
    server.add(Draft(0, TokenSequence.of(text), 1, expansions=((END, 2), (0, 1)), alone=True))
    server.jobs[0].prefix.num_cached = 8
    forward = server.begin(8)
    assert packed.can_grow(forward.requests[0], [[(0, 1)]])
    with pytest.raises(ValueError, match="9 rows: a forward has 8 at most"):
        list(packed.poll_levels(forward.requests[0], [[(0, 1)]]))
    assert packed.pool.slots.num_free == 100
    assert set(server.poll(forward)) <= {None}
    best = plain_logits(llama, ForwardRequest(text, 9)).topk(2).indices[0].tolist()
    assert [event for _, _, event in server.finish(forward)] == [DraftedLevel(0, (tuple(best),))]


def test_forward_packed_refuses_what_does_not_fit(llama: Any) -> None:
    packed = PackedCudaModel(llama, 80, 20, sizes=(1, 16))
    with pytest.raises(ValueError, match="an empty text"):
        packed.forward_packed([ForwardRequest([], 0)])
    with pytest.raises(ValueError, match="a text of 81 tokens: there is room for 80"):
        packed.forward_packed([ForwardRequest([1] * 81, 81)])
    with pytest.raises(ValueError, match="26 new tokens: of 20 in the KV cache, 20 are free"):
        packed.forward_packed([ForwardRequest([1] * 26, 26)])
    with pytest.raises(ValueError, match="a tree of 65 levels: there may be 64"):
        packed.forward_packed([ForwardRequest([1], 1, tree=tuple((i - 1, 2) for i in range(65)), asked=(64,))])
    check(llama, packed, [ForwardRequest([1, 2, 3], 2)])


def test_packed_cuda_model_refuses_models_without_kernels() -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=9))
    with pytest.raises(ValueError, match="a gpt2 model has no kernels for forwards of several texts"):
        PackedCudaModel(model, 16, 16)


def num_new(pool: TextPool, tokens: Sequence[int]) -> int:
    """How many tokens of a text a forward computes."""
    begun = pool.begin([ForwardRequest(tokens, len(tokens))])
    pool.finish(begun)
    return begun[0].rows.num_rows


def test_texts_that_begin_with_one_token_keep_their_slots() -> None:
    pool = TextPool(100, 8, MAX_LENGTH)
    texts = [[1, 2, 3, 4], [1, 3, 4, 5, 6]]
    rows = []
    for _ in range(3):
        for text in texts:
            rows.append(num_new(pool, text))
            text.append(7)
    assert rows == [4, 4, 1, 1, 1, 1]
    texts[0][-3:] = [8]  # after a rejection
    assert num_new(pool, texts[0]) == 1
    assert pool.slots.num_free == 100 - 5 - 6


def test_list_of_tokens_is_not_taken_for_another_that_is_gone() -> None:
    """Python reuses the identity of a list that is freed."""
    pool = TextPool(100, 8, MAX_LENGTH)
    texts = [[1, first, 3, 4, 5] for first in (2, 3)]
    assert [num_new(pool, text) for text in texts] == [5, 4]
    assert [num_new(pool, [*text, 6]) for _ in range(3) for text in texts] == [1] * 6


class Later:
    """The event of a forward that ends when it has been asked about so often."""

    def __init__(self, queries: int) -> None:
        self.left = queries

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def polled(steps: Generator[None, None, list[Any]]) -> Iterator[list[Any] | None]:
    """None until it is there, then what a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            yield end.value
            return
        yield None


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_two_forwards_in_flight_compute_what_each_does_alone(llama: Any, data: st.DataObject) -> None:
    """With so few slots that the second may have to wait for the first."""
    packed = PackedCudaModel(llama, MAX_LENGTH, data.draw(st.sampled_from([44, 200])), max_texts=3, sizes=(4, 16))
    packed._end = lambda: Later(3)  # type: ignore[method-assign]
    texts = [[1, 2], [1, 2, 3], [7], [7, 1]]
    for picks in data.draw(st.lists(st.booleans(), min_size=1, max_size=5)):
        for i in range(4):
            kept = data.draw(st.integers(1, len(texts[i])))
            texts[i] = [*texts[i][:kept], *data.draw(st.lists(st.integers(1, 4), max_size=6))][:14]
        requests = [ForwardRequest(text, len(text) + data.draw(st.integers(0, 1))) for text in texts]
        poll = packed.poll_picked if picks else packed.poll_forward_packed
        running = [polled(poll(pair)) for pair in (requests[:2], requests[2:])]
        answers: list[list[Any] | None] = [None, None]
        while None in answers:
            answers = [answer or next(steps) for steps, answer in zip(running, answers)]
        for request, answer in zip(requests, [*(answers[0] or []), *(answers[1] or [])], strict=True):
            if request.num_positions:
                [expected] = plain_logits(llama, request)
                if picks:
                    assert answer[0, 0] == expected.argmax()
                else:
                    assert torch.allclose(answer[0], expected, atol=1e-4 * float(expected.abs().max()))
        assert not packed.pool.has_in_flight
    packed.pool.clear()


def test_a_text_of_which_nothing_has_to_be_computed_keeps_no_slots(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 200)
    for _ in range(2):
        packed.forward_packed([ForwardRequest([1, 2, 3], 4)])
    assert not packed.pool.has_in_flight


def test_a_forward_in_flight_keeps_the_slots_that_it_fills(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 32, max_texts=2)
    first, second = [1] * 20, [2] * 20
    begun = packed.pool.begin([ForwardRequest(first, 20)])
    with pytest.raises(NoRoom, match="20 new tokens: of 32 in the KV cache, 12 are free"):
        packed.pool.begin([ForwardRequest(second, 20)])
    assert packed.pool.has_in_flight
    packed.pool.finish(begun)
    assert [pooled.rows.num_rows for pooled in packed.pool.begin([ForwardRequest(second, 20)])] == [20]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_poll_following_verifies_the_tree_that_is_being_drafted(name: str) -> None:
    """All of it is launched before the host knows a token; a path that becomes text is cached."""
    drafter, target = PackedCudaModel(random_model("qwen3"), MAX_LENGTH, 400, drafts=True), random_model(name)
    packed, text = PackedCudaModel(target, MAX_LENGTH, 400), Random(7).choices(range(1, VOCAB_SIZE), k=61)
    levels: list[Level] = [[(0, 2), (1, 1)], [(2, 2)]]
    for _ in range(3):
        request = ForwardRequest(text, len(text), num_children=(2,))
        tree: list[tuple[int, int]] = []
        drafting = drafter.poll_levels(request, levels)
        expanded = iter([0, 1, 2])
        tree += [(END, token) for token in next(drafting)[0]]  # type: ignore[index]
        assert drafter.launched is not None
        asked = ForwardRequest(text, len(text))
        assert packed.can_follow(asked, drafter.launched)
        following = packed.poll_following(asked, drafter.launched, lambda: tuple(tree) if len(tree) == 7 else None)  # noqa: B023
        assert next(following) is None
        for other in ([1, 2, 3], [4, 5, 6]):  # whose picked tokens are others
            run_to_end(packed.poll_picked([ForwardRequest(other, 1)]))
        for children in drafting:
            for tokens in children or ():
                parent = next(expanded)
                tree += [(parent, token) for token in tokens]
        assert drafter.launched is None
        with pytest.raises(StopIteration) as end:
            next(following)
        known = ForwardRequest(text, len(text), tree=tuple(tree), asked=range(7))
        assert end.value.value[:, 0].tolist() == plain_logits(target, known).argmax(-1).tolist()
        text = [*text, *tree_path(tuple(tree), 5), 3]
        [begun] = packed.pool.begin([ForwardRequest(text, len(text))])
        packed.pool.cancel([begun])
        assert begun.rows.num_rows == 1  # the path is cached
        check(target, packed, [ForwardRequest(text, len(text))])


def test_can_follow_knows_its_limits(llama: Any) -> None:
    drafter, small = (PackedCudaModel(llama, MAX_LENGTH, 200, sizes=(1, 8), drafts=drafts) for drafts in (True, False))
    request = ForwardRequest([1, 2, 3], 3, num_children=(2,))
    drafting = drafter.poll_levels(request, [[(0, 2), (1, 1)]])
    next(drafting)
    launched = drafter.launched
    assert launched is not None
    assert small.can_follow(ForwardRequest([1, 2, 3], 3), launched)
    assert not small.can_follow(ForwardRequest([1] * 9, 3), launched)  # with 5 nodes more rows than there are
    assert not small.can_follow(ForwardRequest([1, 2, 3], 3, tree=TREE[:1], asked=(0,)), launched)
    steps = small.poll_following(ForwardRequest([1, 2, 3], 3), launched, lambda: None)
    assert next(steps) is None
    steps.close()
    assert not small.pool.has_in_flight
    small.pool.clear()
    assert small.pool.slots.num_free == 200


def test_a_chain_of_nodes_that_are_there_cannot_be_followed(llama: Any) -> None:
    drafter, target = (PackedCudaModel(llama, MAX_LENGTH, 200, drafts=drafts) for drafts in (True, False))
    drafting = drafter.poll_levels(ForwardRequest([1, 2], 3, tree=TREE[:2], asked=(0, 1), num_children=(2, 1)), [])
    next(drafting, None)
    launched = drafter.launched
    assert launched is None or not target.can_follow(ForwardRequest([1, 2], 2), launched)


def server_with_two_forwards(
    llama: Any, num_slots: int, first: list[list[int]], second: list[list[int]]
) -> tuple[PackedServer, list[InFlight]]:
    """The first forward ends when it has been polled four times, all others at once."""
    packed, queries = PackedCudaModel(llama, MAX_LENGTH, num_slots, max_texts=12), chain([3], repeat(0))
    packed._end = lambda: Later(next(queries))  # type: ignore[method-assign]
    model, numbers = SamplingModel(packed), count()
    server = PackedServer(Server("target-1", "target", model), model)
    in_flight: list[InFlight] = []
    for texts in (first, second):
        for text in texts:
            server.add(Verify(next(numbers), TokenSequence.of(text), 1))
        forward = server.begin(server.max_tokens)
        in_flight.append((forward, server.poll(forward)))
        next(in_flight[0][1], None)  # the first is launched, and polled
    return server, in_flight


def greedy_tokens(server: PackedServer, forward: InFlight) -> list[Tokens]:
    for _ in forward[1]:
        pass
    return [event.tokens if isinstance(event, Verified) else () for *_, event in server.finish(forward[0])]


def test_a_forward_that_fails_does_not_change_what_another_in_flight_has_picked(llama: Any) -> None:
    """Its requests are answered one by one meanwhile."""
    texts = [[[start, i, 7] for i in range(1, 5)] for start in (5, 9)]
    server, (first, second) = server_with_two_forwards(llama, 600, texts[0], [*texts[1], [1] * (MAX_LENGTH + 1)])
    answers = [greedy_tokens(server, forward) for forward in (second, first)]
    expected = [
        [tuple(plain_logits(llama, ForwardRequest(text, 3))[0].argmax(-1, True).tolist()) for text in own]
        for own in texts
    ]
    assert answers == [[*expected[1], ()], expected[0]]


def test_what_has_no_room_beside_a_forward_in_flight_waits_for_it(llama: Any) -> None:
    server, (first, second) = server_with_two_forwards(llama, 64, [[5] * 50], [[1] * (MAX_LENGTH + 1), [1] * 30])
    for _ in range(2):
        assert next(second[1]) is None  # its first request was refused, and the other has to wait
    assert len(greedy_tokens(server, first)) == 1
    [expected] = plain_logits(llama, ForwardRequest([1] * 30, 30)).argmax(-1).tolist()
    assert greedy_tokens(server, second) == [(), (expected,)]
