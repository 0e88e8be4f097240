"""Forwards with a truncated and forked KV cache, on small models of several architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

from cancel_flags import CancelAfter
from dsi.core.messages import Sampling
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.core.request import Request
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.models.hf import Transformer, check_supported, context_length, load_model
from dsi.models.kv_sequence import KVSequence, common_prefix_length
from dsi.models.protocol import Cancelled, ForwardRequest, SamplingModel
from dsi.models.wait import Latency, Wait

SMALL = {"vocab_size": 97, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
BIG = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0}
GPT = {"vocab_size": 97, "n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 128}

MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BIG)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**BIG, num_key_value_heads=2)),
    "gpt_bigcode": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**GPT)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**BIG)),
    "mistral with a window": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**BIG, num_key_value_heads=2, sliding_window=6)
    ),
}
PROMPT = (5, 17, 3, 88, 41)


def make(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MAKERS[name]().float().eval()


@pytest.fixture(scope="module", params=MAKERS)
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def generated(model: Any, count: int) -> tuple[int, ...]:
    """The text of transformers' own greedy generation."""
    prompt = torch.tensor([PROMPT])
    text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(text[0, len(PROMPT) :].tolist())


def noisy(model: Any, amount: float) -> Any:
    """A drafter that agrees often: the same weights with a little noise."""
    import copy

    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += amount * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0
    return twin


def fleet(target: Any, drafter: Any, sp: int) -> SimulatedFleet:
    """Real forwards at virtual latencies: the order of events is deterministic, the tokens are real."""
    servers = [
        Server(f"target-{i}", "target", Wait(SamplingModel(Transformer(target)), Latency(7.0))) for i in range(sp)
    ]
    servers.append(Server("drafter", "drafter", Wait(SamplingModel(Transformer(drafter)), Latency(1.0))))
    return SimulatedFleet(servers)


@pytest.mark.slow
@pytest.mark.parametrize("sp", [1, 3])
def test_transformer_text_is_that_of_generate_under_every_algorithm(model: Any, sp: int) -> None:
    expected = generated(model, 40)
    drafter = noisy(model, 0.1)
    for policy in (autoregressive(), speculative(4), pearl(4), distributed(2), distributed(3, min_draft=2)):
        [done] = EngineLoop(fleet(model, drafter, sp)).run(Request(PROMPT, 40, policy))
        assert done.tokens == expected


@pytest.mark.slow
def test_transformer_seed_gives_one_text_under_every_algorithm(model: Any) -> None:
    drafter = noisy(model, 0.1)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=4)
    texts = {
        EngineLoop(fleet(model, drafter, sp)).run(Request(PROMPT, 30, policy, sampling))[0].tokens
        for sp in (1, 2, 3)
        for policy in (autoregressive(), speculative(4), pearl(4), distributed(2))
    }
    assert len(texts) == 1


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("llama")


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@given(requests, st.integers(1, 3), st.sampled_from([0, 2, 32]))
@settings(max_examples=60)
def test_transformer_logits_are_independent_of_the_cache(
    llama: Any, requests: list[tuple[list[int], int]], max_sequences: int, max_overwrite: int
) -> None:
    backend = Transformer(llama, max_sequences)
    backend.max_overwrite = max_overwrite
    for tokens, back in requests:
        start = max(1, len(tokens) - back)
        logits = backend.forward(tokens, start)
        expected = llama(torch.tensor([tokens])).logits[0, start - 1 :]
        assert torch.allclose(logits, expected, atol=1e-5)


def test_transformer_forks_the_cache_of_a_shared_prefix(llama: Any) -> None:
    """Else each would recompute what the other has overwritten, in turn."""
    counted: list[int] = []
    handle = llama.model.embed_tokens.register_forward_hook(lambda _, ids, __: counted.append(ids[0].shape[1]))
    backend = Transformer(llama)
    backend.max_overwrite = 2
    one, other = [*PROMPT, 1, 2, 3, 4], [*PROMPT, 5, 6, 7, 8]
    for text in (one, other, [*one, 9], [*other, 9], [*one, 9, 9]):
        backend.forward(text, len(text))
    handle.remove()
    assert counted == [len(one), 4, 1, 1, 1]


def test_transformer_evicts_the_least_recently_used_sequence(llama: Any) -> None:
    backend = Transformer(llama, max_sequences=2)
    for first in range(5):
        backend.forward([first, 1, 1, 1], 4)
    assert [sequence.tokens[0] for sequence in backend._sequences] == [3, 4]


def test_sampling_model_returns_top_logprobs(llama: Any) -> None:
    text = list(PROMPT)
    guesses = (((4, None),), ())
    tokens, logprobs = SamplingModel(Transformer(llama)).answer_with_logprobs(
        ForwardRequest(text, len(text) - 1, sampling=Sampling(logprobs=2), guesses=guesses)
    )
    expected = llama(torch.tensor([text])).logits[0, -2:].detach().log_softmax(-1)
    assert tokens == tuple(expected.argmax(-1).tolist())
    for row, position, required in zip(expected, logprobs, ([4], [])):
        best = row.topk(2).indices.tolist()
        assert {token for token, _ in position} == {*best, *required}
        assert dict(position) == pytest.approx({token: float(row[token]) for token, _ in position}, abs=1e-5)


def test_transformer_computes_only_new_tokens(llama: Any) -> None:
    counted: list[int] = []
    handle = llama.model.embed_tokens.register_forward_hook(lambda _, ids, __: counted.append(ids[0].shape[1]))
    backend = Transformer(llama)
    for tokens, start in (
        (PROMPT, 5),
        ((*PROMPT, 1), 6),
        ((*PROMPT, 1, 2, 3), 7),
        ((*PROMPT, 9), 6),
        ((*PROMPT, 9), 5),
    ):
        backend.forward(tokens, start)
    handle.remove()
    assert counted == [5, 1, 2, 1, 2]  # the last requests logits whose token must be recomputed


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_transformer_cancels_between_layers_and_restores_the_cache(llama: Any, checks: int) -> None:
    backend = Transformer(llama)
    backend.forward(PROMPT, 5)
    with pytest.raises(Cancelled):
        backend.forward((*PROMPT, 1, 2, 3), 6, CancelAfter(checks))
    logits = backend.forward((*PROMPT, 1, 2), 6)
    assert torch.allclose(logits, llama(torch.tensor([[*PROMPT, 1, 2]])).logits[0, 5:], atol=1e-5)


def test_transformer_prefill_returns_no_logits(llama: Any) -> None:
    backend = Transformer(llama)
    assert backend.forward(PROMPT, 6).shape[0] == 0
    assert SamplingModel(backend).answer(ForwardRequest(PROMPT, 6)) == ()
    assert len(SamplingModel(backend).answer(ForwardRequest(PROMPT, 4))) == 2


def test_transformer_refuses_in_one_sentence(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an empty text"):
        Transformer(llama).forward((), 0)
    with pytest.raises(ValueError, match="a text of 129 tokens: the model's context is 128"):
        Transformer(llama).forward([1] * 129, 129)
    with pytest.raises(ValueError, match="there is no such model folder"):
        load_model(tmp_path / "nothing")
    llama.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(tmp_path)


KV_HEADS = {**BIG, "num_key_value_heads": 2}
UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
    "jamba": lambda: hf.JambaConfig(
        **KV_HEADS, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    ),
    "lfm2": lambda: hf.Lfm2Config(**KV_HEADS, layer_types=["conv", "full_attention", "conv"]),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **KV_HEADS, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "xlnet": lambda: hf.XLNetConfig(vocab_size=97, d_model=32, n_layer=2, n_head=4, d_inner=64),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_load_model_refuses_a_state_beside_the_kv_cache_by_its_config(kind: str, tmp_path: Path) -> None:
    """The folder has no weights: nothing is loaded before the refusal."""
    UNSUPPORTED[kind]().save_pretrained(tmp_path)
    what = "have no KV cache" if kind == "xlnet" else "keep a state"
    with pytest.raises(ValueError, match=f": {kind} models {what} that can(not)? be cut back to an earlier token$"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_transformer_refuses_a_loaded_model_with_a_state(kind: str) -> None:
    model = hf.AutoModelForCausalLM.from_config(UNSUPPORTED[kind]())
    with pytest.raises(ValueError, match=f"{kind} models keep a state"):
        Transformer(model)


@pytest.mark.parametrize("kind", MAKERS)
def test_check_supported_takes_models_with_a_kv_cache(kind: str) -> None:
    check_supported(make(kind).config, kind)


def test_context_length_is_never_negative() -> None:
    assert context_length(hf.XLNetConfig()) == 0
    assert context_length(hf.GPT2Config(n_positions=128)) == 128


def test_transformer_loads_a_saved_model(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    read: list[str] = []
    logits = Transformer(load_model(tmp_path, status=read.append)).forward(PROMPT, 1)
    assert read == [f"{i} of {len(read)} tensors" for i in range(1, len(read) + 1)]
    assert len(read) > 3
    assert hf.logging.set_tqdm_hook(None) is None  # it is as it was
    assert torch.equal(logits, Transformer(llama).forward(PROMPT, 1))


@given(
    st.integers(0, 40),
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 1), max_size=40),
)
def test_common_prefix_length_of_two_texts(alike: int, a: list[int], b: list[int]) -> None:
    """They may diverge near the end or far before it."""
    a, b = [2] * alike + a, [2] * alike + b
    n = common_prefix_length(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


class Counted(Transformer):
    """Notes how many tokens each forward computes."""

    def __init__(self, model: Any, max_sequences: int) -> None:
        super().__init__(model, max_sequences)
        self.counts: list[int] = []

    def _compute(self, sequence: KVSequence, new_tokens: list[int], num_positions: int) -> Any:
        self.counts.append(len(new_tokens))
        return super()._compute(sequence, new_tokens, num_positions)


@pytest.mark.parametrize("max_sequences", [2, 32])
def test_transformer_keeps_apart_texts_that_begin_with_one_token(llama: Any, max_sequences: int) -> None:
    backend = Counted(llama, max_sequences)
    texts = [[1, *PROMPT], [1, 2, *PROMPT]]
    for _ in range(3):
        for text in texts:
            backend.forward(text, len(text))
            text.append(4)
    assert backend.counts == [6, 6, 1, 1, 1, 1]


def test_transformer_keeps_texts_apart_when_all_its_sequences_are_taken(llama: Any) -> None:
    """Those of texts that have ended, the least recently used ones, are dropped."""
    backend = Counted(llama, 32)
    for first in range(32):
        backend.forward([first, 1], 2)
    texts = [[31, *PROMPT], [31, 2, *PROMPT]]
    for _ in range(2):
        for text in texts:
            backend.forward(text, len(text))
            text.append(4)
    assert backend.counts[32:] == [5, 6, 1, 1]
    assert len(backend._sequences) == 32


def test_transformer_forks_nothing_after_a_rejection(llama: Any) -> None:
    backend = Counted(llama, 32)
    text = list(PROMPT)
    for draft in ([3, 4], [7], [5, 6, 7, 8]):
        text[len(PROMPT) :] = draft
        backend.forward(text, len(PROMPT) + 1)
    assert backend.counts == [7, 1, 4]
    assert len(backend._sequences) == 1
    backend.forward(list(PROMPT), len(PROMPT))
    assert backend.counts[3:] == [1]


def test_transformer_does_not_take_one_list_of_tokens_for_another_that_is_gone(llama: Any) -> None:
    """Python reuses the identity of a list that is freed."""
    backend = Counted(llama, 32)
    texts = [[1, first, *PROMPT] for first in (2, 3)]
    for text in texts:
        backend.forward(text, len(text))
    for _ in range(20):
        for text in texts:
            backend.forward(list(text), len(text) + 1)
            backend.forward([*text, 4], len(text) + 1)
    assert backend.counts == [7, 6] + [1] * 40


def test_transformer_finds_the_longest_prefix_whatever_was_used_last(llama: Any) -> None:
    backend = Counted(llama, 32)
    backend.forward(PROMPT, 5)
    backend.forward([PROMPT[0]], 1)
    backend.forward([*PROMPT, 3], 6)
    assert backend.counts == [5, 1, 1]
