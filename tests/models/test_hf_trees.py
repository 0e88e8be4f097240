"""Trees of draft tokens in transformers models: the logits of plain forwards, and nothing computed twice."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.cache_utils import Cache

from backend_forwards import forward_packed, forward_tree
from cancel_flags import CancelAfter
from dsi.core.tree_shape import END, Tree
from dsi.models.cpu.transformer import CompiledTransformer
from dsi.models.hf import Transformer
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.masked_rows import MaskedRows
from dsi.models.protocol import Cancelled, ForwardRequest, SamplingModel, tree_path

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 97}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
OPT = {"ffn_dim": 72, "word_embed_proj_dim": 32, "do_layer_norm_before": True}
CONFIGS: dict[str, Any] = {
    "gpt2": hf.GPT2Config(**GPT2),
    "opt": hf.OPTConfig(**SIZES, **OPT),
    "gpt_neox": hf.GPTNeoXConfig(**SIZES),
    "phi": hf.PhiConfig(**SIZES),
    "phi3 sliding": hf.Phi3Config(**SIZES, sliding_window=7, pad_token_id=0),
    "llama": hf.LlamaConfig(**SIZES),
    "mistral sliding": hf.MistralConfig(**SIZES, sliding_window=6),
    "qwen2 mixed": hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "gemma2": hf.Gemma2Config(**SIZES, head_dim=16, sliding_window=7),
    "gemma3": hf.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6, layer_types=MIXED),
    "cohere2": hf.Cohere2Config(**SIZES, sliding_window=5),
    "olmo2": hf.Olmo2Config(**SIZES),
    "starcoder2": hf.Starcoder2Config(**SIZES, sliding_window=6),
}
OWN_MASKS: dict[str, Any] = {
    "bloom": hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4),
    "gpt_neo": hf.GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "mpt": hf.MptConfig(vocab_size=97, d_model=32, n_layers=3, n_heads=4),
}
TOKENS = [int(token) for token in torch.randint(1, 97, (40,), generator=torch.Generator().manual_seed(1))]
TREE: Tree = ((END, 5), (END, 6), (0, 7), (1, 8), (1, 9), (4, 10), (5, 11))


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 10
    return model


def plain_rows(model: Transformer, tokens: Sequence[int], start: int, tree: Tree, asked: Sequence[int]) -> torch.Tensor:
    texts: list[tuple[Sequence[int], int]] = [(tokens, start)] if start <= len(tokens) else []
    for node in asked:
        text = [*tokens, *tree_path(tree, node)]
        texts.append((text, len(text)))
    return torch.cat([model.forward(*text) for text in texts])


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


class Counting(Transformer):
    """Counts the rows of tree forwards."""

    rows = 0

    def _run_masked(self, cache: Cache, rows: MaskedRows) -> Any:
        self.rows += len(rows.tokens)
        return super()._run_masked(cache, rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tree_forward_gives_the_logits_of_plain_forwards(name: str, attention: str) -> None:
    model = random_model(CONFIGS[name])
    if model._supports_sdpa:
        model.set_attn_implementation(attention)
    plain, trees, random = Transformer(model), Transformer(model), Random(name)
    assert trees.supports_trees
    text = TOKENS[:20]
    for size in (1, 6, 14):
        tree: Tree = tuple((max(END, i - random.choice((1, 1, 2, 4))), random.randrange(1, 97)) for i in range(size))
        asked = random.sample(range(size), random.randrange(1, size + 1))
        for start in (len(text) + 1, len(text) - 2):
            assert_same(forward_tree(trees, text, start, tree, asked), plain_rows(plain, text, start, tree, asked))
        text = [*text, *tree_path(tree, asked[0]), 3]


@pytest.mark.parametrize("kind", [LlamaCpu, CompiledTransformer])
def test_tree_forward_of_other_implementations(kind: Any) -> None:
    model = random_model(hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}))
    plain, trees = Transformer(model), kind(model)
    assert trees.supports_trees
    for text, start in ((TOKENS[:20], 15), (TOKENS[:20], 21), ([*TOKENS[:20], 6, 9], 22)):
        expected = plain_rows(plain, text, start, TREE, [6, 0, 3])
        assert_same(forward_tree(trees, text, start, TREE, [6, 0, 3]), expected)
    trees.release()


@pytest.mark.parametrize("name", OWN_MASKS)
def test_models_with_masks_of_their_own_compute_trees_text_by_text(name: str) -> None:
    backend = Transformer(random_model(OWN_MASKS[name]))
    assert not backend.supports_trees
    request = ForwardRequest(TOKENS, len(TOKENS), tree=TREE, asked=[2, 6])
    tokens, _ = SamplingModel(backend).answer_tree(request)[:2]
    assert tokens == tuple(plain_rows(backend, TOKENS, len(TOKENS), TREE, [2, 6]).argmax(-1).tolist())


def test_model_that_ignores_masks_computes_trees_text_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Transformer(random_model(CONFIGS["gpt2"]))
    shown = lambda rows: {"": torch.zeros(1, 1, *rows.visible.shape)}  # noqa: E731
    monkeypatch.setattr(backend, "_masks", shown)
    assert not backend.supports_trees


def test_sampling_model_answers_about_a_tree_in_one_forward() -> None:
    backend = Counting(random_model(CONFIGS["gpt2"]))
    assert backend.supports_trees
    backend.rows = 0
    request = ForwardRequest(TOKENS, len(TOKENS), tree=TREE, asked=range(7))
    tokens, _ = SamplingModel(backend).answer_tree(request)[:2]
    assert backend.rows == 7  # those of the prompt came before
    assert tokens == tuple(plain_rows(backend, TOKENS, len(TOKENS), TREE, list(range(7))).argmax(-1).tolist())


def test_accepted_path_is_not_recomputed() -> None:
    model = Counting(random_model(CONFIGS["mistral sliding"]))
    forward_tree(model, TOKENS[:20], 20, TREE, range(7))
    text, before = [*TOKENS[:20], 6, 9, 10], model.rows
    logits = forward_tree(model, text, 24, ((END, 11), (0, 12)), [1])  # 11 is cached, too
    assert model.rows - before == 1
    assert_same(logits, plain_rows(Transformer(model.model), [*text, 11, 12], 25, (), []))
    longer = [*text, 11, 12, 13]
    assert_same(model.forward(longer, 26), Transformer(model.model).forward(longer, 26))


def test_tree_grown_level_by_level_computes_each_node_once() -> None:
    model = Counting(random_model(CONFIGS["gemma3"]))
    model.forward(TOKENS, 40)
    rows = [
        forward_tree(model, TOKENS, 41, TREE[:last], range(first, last)) for first, last in ((0, 2), (2, 5), (5, 7))
    ]
    assert model.rows == 7
    assert_same(torch.cat(rows), plain_rows(Transformer(model.model), TOKENS, 41, TREE, list(range(7))))


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_cancelled_tree_forward_leaves_nothing(checks: int) -> None:
    model = Transformer(random_model(CONFIGS["gpt2"]))
    expected = plain_rows(model, TOKENS[:30], 31, TREE, [6]), model.forward(TOKENS, 31)
    forward_tree(model, TOKENS[:30], 30, TREE, range(7))
    with pytest.raises(Cancelled):
        forward_tree(model, [*TOKENS[:30], 6], 31, ((END, 9), (END, 3)), [0, 1], CancelAfter(checks))
    assert_same(forward_tree(model, TOKENS[:30], 31, TREE, [6]), expected[0])
    assert_same(model.forward(TOKENS, 31), expected[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_forward_gives_each_text_and_tree_the_logits_it_has_alone(name: str, attention: str) -> None:
    model = random_model(CONFIGS[name])
    if model._supports_sdpa:
        model.set_attn_implementation(attention)
    packed, plain = Transformer(model, 32), Transformer(model)
    assert packed.can_pack
    texts = [TOKENS, TOKENS[::-1], TOKENS[20:] + TOKENS[:20], [*TOKENS[:10], *TOKENS[::-1][:30]]]
    done = [0] * len(texts)
    for number, step in enumerate(((3, 1, 7, 0), (1, 9, 2, 9), (10, 1, 3, 5), (9, 10, 1, 10))):
        ends = [a + b for a, b in zip(done, step)]
        trees: list[Tree] = [(), TREE, ((END, 1), (END, texts[2][ends[2] % 40]), (1, 8)), TREE[:3]]
        requests = [
            ForwardRequest(texts[i][: ends[i]], done[i] + 1, tree=trees[i], asked=range(number % 2, len(trees[i])))
            for i, width in enumerate(step)
            if width
        ]
        for request, logits in zip(requests, packed.forward_packed(requests)):
            assert_same(logits, plain_rows(plain, request.tokens, request.start, request.tree, request.asked))
        done = ends


@pytest.mark.parametrize(("attention", "apart"), [("sdpa", True), ("eager", False)])
def test_packed_forward_attends_text_by_text_where_attention_can_be_replaced(attention: str, apart: bool) -> None:
    model = random_model(CONFIGS["gpt2"])
    model.set_attn_implementation(attention)
    transformer = Transformer(model, 32)
    assert transformer.attends_apart == apart
    transformer.forward(TOKENS[:5], 5)
    transformer.forward(TOKENS[9:14], 5)
    forward_packed(transformer, [(TOKENS[:6], 6), (TOKENS[9:15], 6)])
    assert model.config._attn_implementation == attention


def test_packed_forwards_with_threads_and_kv_caches_of_their_own() -> None:
    model = Transformer(random_model(CONFIGS["gpt2"]))
    other, threads = model.with_threads(2, 64), torch.get_num_threads()
    try:
        assert (model.can_pack, other.can_pack) == (False, True)
        assert_same(other.forward(TOKENS, 40), model.forward(TOKENS, 40))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_packed_forward_of_llama_and_of_prompts() -> None:
    model = LlamaCpu(random_model(hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4})), 32)
    texts = [TOKENS, TOKENS[::-1], TOKENS[20:]]
    expected = [model.forward(text, len(text)) for text in texts]
    model.clear_cache()
    model.forward(TOKENS[:30], 31)
    prefilled, *logits = forward_packed(model, [(TOKENS[:31], 32), *((text, len(text)) for text in texts)])
    assert prefilled.numel() == 0
    for own, alone in zip(logits, expected):
        assert_same(own, alone)


def test_packed_forward_of_chunks_of_prompts_alone() -> None:
    for model in (
        Transformer(random_model(CONFIGS["gpt2"]), 32),
        LlamaCpu(random_model(hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4})), 32),
    ):
        texts = [TOKENS, TOKENS[::-1]]
        expected = [model.forward(text, len(text)) for text in texts]
        model.clear_cache()
        for end in (10, 20):  # of which no logits are wanted
            forward_packed(model, [(text[:end], end + 1) for text in texts])
        for own, alone in zip(forward_packed(model, [(text, len(text)) for text in texts]), expected):
            assert_same(own, alone)


def test_packed_forward_needs_masks_and_kv_caches() -> None:
    assert not Transformer(random_model(CONFIGS["gpt2"])).can_pack
    assert not Transformer(random_model(OWN_MASKS["bloom"]), 32).can_pack


def test_packed_forward_that_fails_leaves_nothing() -> None:
    model = Transformer(random_model(CONFIGS["gpt2"]), 32)
    texts = [TOKENS[:20], TOKENS[::-1]]
    expected = [model.forward([*text, 3, 4], len(text) + 1) for text in texts]
    for text in texts:
        model.forward(text, len(text))
    with pytest.raises(IndexError):
        forward_packed(model, [([*texts[0], 3], 20), ([*texts[1], 1000], 41)])
    for text, alone in zip(texts, expected):
        assert_same(forward_packed(model, [([*text, 3, 4], len(text) + 1)])[0], alone)


def test_tree_forward_in_bfloat16_is_close_to_plain_forwards() -> None:
    model = Transformer(random_model(CONFIGS["qwen2 mixed"]).bfloat16())
    assert model.supports_trees
    logits = forward_tree(model, TOKENS, 41, TREE, range(7))
    expected = plain_rows(Transformer(model.model), TOKENS, 41, TREE, list(range(7)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
