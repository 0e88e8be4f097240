"""The compiled decoder: the logits of transformers, and the same bits however a text is cut into forwards."""

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

from backend_forwards import forward_packed
from cancel_flags import CancelAfter
from dsi.core.messages import TARGET, Draft, Drafted, DraftedBlock, Sampling, Verified, Verify
from dsi.core.sequence import TokenSequence
from dsi.core.tree_shape import END
from dsi.engine.build import cpu_model
from dsi.fleets.packed import PackedServer
from dsi.fleets.servers import Server
from dsi.models.cpu.decoder import LOGITS, CompiledDecoder, RowAnswers, TextPart, rotary_embedding
from dsi.models.cpu.huge_pages import move_to_huge_pages
from dsi.models.cpu.linear import quantize_int8
from dsi.models.hf import Transformer
from dsi.models.kv_sequence import KVSequence
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.protocol import (
    Answer,
    Cancelled,
    ForwardRequest,
    SamplingModel,
    StopFlag,
    generate_packed,
    run_to_end,
)
from models.cpu.shapes import SHAPES, random_model

TOKENS = [int(token) for token in torch.randint(1, 97, (80,), generator=torch.Generator().manual_seed(1))]


def logits_of_transformers(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()  # type: ignore[no-any-return]


def in_parts(decoder: CompiledDecoder, widths: list[int]) -> torch.Tensor:
    """The logits of all positions, the text read in forwards of these widths."""
    decoder.clear_cache()
    parts = [decoder.forward(TOKENS[:end], start + 1) for start, end in pairwise([0, *accumulate(widths)])]
    return torch.cat(parts)


@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_gives_the_logits_of_transformers(shape: str) -> None:
    model = random_model(shape)
    decoder = cpu_model(model)
    assert isinstance(decoder, CompiledDecoder)
    expected = logits_of_transformers(model)
    largest = float(expected.abs().max())
    torch.testing.assert_close(decoder.forward(TOKENS, 1), expected, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_in_bfloat16_is_close_to_transformers(shape: str) -> None:
    model = random_model(shape, torch.bfloat16)
    expected = logits_of_transformers(model)
    largest = float(expected.abs().max())
    torch.testing.assert_close(CompiledDecoder(model).forward(TOKENS, 1), expected, rtol=0, atol=0.05 * largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_gives_the_same_bits_for_every_width_and_number_of_threads(shape: str, dtype: str) -> None:
    model = random_model(shape, torch.float32 if dtype == "float32" else torch.bfloat16)
    model = quantize_int8(model) if dtype == "int8" else model
    decoder = CompiledDecoder(model)
    whole = decoder.forward(TOKENS, 1)
    for widths in ([1] * 80, [7, 3, 20, 1, 1, 2, 46], [2] * 40, [5] * 16, [9] * 8 + [8], [33, 47]):
        assert torch.equal(in_parts(decoder, widths), whole)
    for threads in (2, 3):
        assert torch.equal(in_parts(decoder.with_threads(threads), [64, 1, 15]), whole)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 4))
@settings(max_examples=30)
def test_decoder_gives_the_same_bits_for_any_cut(widths: list[int], threads: int) -> None:
    ends = [end for end in accumulate(widths) if end < len(TOKENS)]
    cut = [b - a for a, b in pairwise([0, *ends, len(TOKENS)])]
    assert torch.equal(in_parts(SHARED.with_threads(threads), cut), EXPECTED)


SHARED = CompiledDecoder(random_model("llama biases", hidden_size=48, head_dim=40))
EXPECTED = SHARED.forward(TOKENS, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_forward_gives_each_text_the_bits_it_has_alone(shape: str, dtype: str) -> None:
    model = random_model(shape, torch.float32 if dtype == "float32" else torch.bfloat16)
    model = quantize_int8(model) if dtype == "int8" else model
    texts = [TOKENS, TOKENS[::-1], TOKENS[40:] + TOKENS[:40], [*TOKENS[:20], *TOKENS[::-1][:60]]]
    alone = [CompiledDecoder(model).forward(text, 1) for text in texts]
    for threads in (1, 2, 3):
        packed = CompiledDecoder(model, 8, threads)
        done, widths = [0] * len(texts), [(3, 1, 7, 0), (1, 40, 2, 9), (60, 1, 33, 5), (16, 38, 38, 66)]
        for step in widths:
            ends = [a + b for a, b in zip(done, step)]
            asked = [i for i, width in enumerate(step) if width]
            rows = forward_packed(packed, [(texts[i][: ends[i]], done[i] + 1) for i in asked])
            for i, logits in zip(asked, rows):
                assert torch.equal(logits, alone[i][done[i] : ends[i]])
            done = ends


@given(st.data())
@settings(max_examples=25)
def test_packed_forward_gives_the_same_bits_for_any_packing(data: st.DataObject) -> None:
    """Texts that share prefixes come and go, are cut back, prefilled, and asked about in part."""
    packed = SHARED.with_threads(data.draw(st.integers(1, 2)))
    texts: list[list[int]] = [[] for _ in range(5)]
    for _ in range(data.draw(st.integers(1, 8))):
        asked = data.draw(st.lists(st.sampled_from(range(5)), min_size=1, unique=True))
        requests = []
        for i in asked:
            end = data.draw(st.integers(1, len(TOKENS)))
            texts[i][:] = [*TOKENS[:end]] if i < 3 else [*TOKENS[: end // 2], *range(1, end - end // 2 + 1)]
            requests.append((texts[i], data.draw(st.integers(1, len(texts[i]) + 1))))
        for (text, start), logits in zip(requests, forward_packed(packed, requests)):
            assert torch.equal(logits, SHARED.forward(list(text), 1)[start - 1 :])


def test_packed_forwards_at_once_give_each_text_the_bits_it_has_alone() -> None:
    """Texts of both begin with the same tokens, so that each looks for what the other has cached."""
    packed = SHARED.with_threads(2, 32)
    halves = [[[*TOKENS[:20], *range(1, 30 + i)] for i in range(j, 8, 2)] for j in range(2)]

    def write(texts: list[list[int]]) -> list[torch.Tensor]:
        grown: list[list[int]] = [[] for _ in texts]
        rows = []
        for end in (*range(16, 28), 60):
            for own, whole in zip(grown, texts):
                own[:] = whole[:end]
            rows.append(torch.cat(packed.forward_packed([ForwardRequest(own, len(own)) for own in grown], 2)))
        return rows

    with ThreadPoolExecutor(2) as threads:
        written = list(threads.map(write, halves))
    for texts, rows in zip(halves, written):
        for end, logits in zip((*range(16, 28), 60), rows):
            assert torch.equal(logits, torch.cat([SHARED.forward(text[:end], len(text[:end])) for text in texts]))


def test_packed_forward_leaves_the_cache_of_a_text_that_is_computed() -> None:
    packed = SHARED.with_threads(1, 32)
    packed.forward_packed([ForwardRequest(TOKENS[:30], 30)])
    [sequence] = packed._sequences
    packed._in_use.add(sequence)  # as while another thread computes its next token
    other = [*TOKENS[:25], 1]
    [logits] = packed.forward_packed([ForwardRequest(other, 26)])
    assert torch.equal(logits, SHARED.forward(other, 26))
    assert sequence.tokens == TOKENS[:30]
    assert len(packed._sequences) == 2


class Counted(CompiledDecoder):
    """Notes how many rows each call computes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts: list[int] = []

    def _compute_parts(self, parts: list[TextPart], answer: RowAnswers = LOGITS, at_once: int = 1) -> list[Any]:
        self.counts.append(sum(part.num_rows for part in parts))
        return super()._compute_parts(parts, answer, at_once)


def test_requests_that_begin_alike_compute_what_is_new() -> None:
    """A prompt is read in chunks, unless most of it is cached."""
    decoder = Counted(SHARED.model, 32)
    server = PackedServer.of(Server("target-1", "target", SamplingModel(decoder)))
    assert server is not None
    server.max_tokens = 32
    prompts = [TOKENS, [*TOKENS, 5, 6], [*TOKENS, 7], [*TOKENS[:60], 8], TOKENS]
    for id, prompt in enumerate(prompts):
        server.add(Verify(id, TokenSequence.of(prompt), 1))
        if id == 4:
            decoder.clear_cache()  # which makes it slower
        while not (events := server.step()):
            pass
        alone = SamplingModel(SHARED).answer(ForwardRequest(prompt, len(prompt)))
        assert [event for *_, event in events] == [Verified(id, alone)]
    assert decoder.counts == [32, 32, 16, 2, 1, 1, 80]


def test_pick_packed_gives_the_likeliest_token_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one forward and in several: in parts of a text, too."""
    texts = [(TOKENS, 3), (TOKENS[:9], 10), (TOKENS[5:30], 25), (TOKENS[2:8], 1)]
    requests = [ForwardRequest(tokens, start) for tokens, start in texts]
    expected = [rows.numpy().argmax(-1).tolist() for rows in SHARED.with_threads(1, 8).forward_packed(requests)]
    for most in (256, 16):
        monkeypatch.setattr("dsi.models.cpu.decoder.MAX_ROWS", most)
        picked = SHARED.with_threads(1, 8).pick_packed(requests)
        assert [rows[:, 0].tolist() for rows in picked] == expected


def test_answer_packed_picks_where_all_are_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SamplingModel(SHARED.with_threads(1, 8))
    greedy, sampled = ForwardRequest(TOKENS, 70), ForwardRequest(TOKENS[3:], 60, sampling=Sampling(1.0, seed=2))
    tree = ForwardRequest(TOKENS[1:], 79, tree=((END, 4), (0, 9)), asked=[0, 1], num_children=[1, 1, 1])
    expected = [model.answer_packed([request, sampled])[0] for request in (greedy, tree)]
    monkeypatch.delattr(CompiledDecoder, "forward_packed")
    assert model.answer_packed([greedy, tree]) == run_to_end(model.poll_packed([greedy, tree])) == expected


def test_packed_forwards_at_once_share_nothing_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the tables of the rotary embedding nor the list of KV caches."""
    decoder = CompiledDecoder(SHARED.model, 32, 2)
    locked: list[bool] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            locked.append(decoder._lock.locked())
            return function(*arguments)

        return noted

    monkeypatch.setattr("dsi.models.cpu.decoder.rotary_embedding", noting(rotary_embedding))
    monkeypatch.setattr(decoder, "_longest_prefix", noting(decoder._longest_prefix))
    decoder.forward_packed([ForwardRequest(TOKENS, 80)], 2)
    assert decoder.num_cached([*TOKENS, 1]) == 80
    assert locked == [True] * 3


def test_packed_forward_of_many_tokens_takes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = CompiledDecoder(random_model("gemma2"))
    whole, other = decoder.forward(TOKENS, 1), decoder.forward(TOKENS[::-1], 1)
    monkeypatch.setattr("dsi.models.cpu.decoder.MAX_ROWS", 17)
    monkeypatch.setattr("dsi.models.kv_sequence.GROWTH", 1)  # room for what is needed alone
    for start in (1, 20, 64, 80, 81):
        decoder.clear_cache()
        first, second = forward_packed(decoder, [(TOKENS, start), (TOKENS[::-1], 1)])
        assert torch.equal(first, whole[start - 1 :])
        assert torch.equal(second, other)


def test_packed_forward_refuses_a_bad_text_before_it_computes() -> None:
    decoder = CompiledDecoder(random_model("llama"))
    expected = decoder.forward(TOKENS, 80)
    with pytest.raises(IndexError, match="must be below 97"):
        forward_packed(decoder, [(TOKENS, 80), ([1, 99], 2)])
    assert torch.equal(forward_packed(decoder, [(TOKENS, 80)])[0], expected)


def test_decoder_returns_to_an_earlier_token() -> None:
    decoder = CompiledDecoder(random_model("qwen3"))
    whole = decoder.forward(TOKENS, 1)
    decoder.forward([*TOKENS[:40], 5, 6, 7], 41)
    assert torch.equal(decoder.forward(TOKENS, 41), whole[40:])


def test_decoder_keeps_several_texts() -> None:
    decoder = CompiledDecoder(random_model("mistral"), max_sequences=2)
    other = TOKENS[::-1]
    first, second = decoder.forward(TOKENS, 1), decoder.forward(other, 1)
    for _ in range(2):
        assert torch.equal(decoder.forward(TOKENS, 80), first[79:])
        assert torch.equal(decoder.forward(other, 80), second[79:])


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_decoder_cancels_between_layers_and_restores_the_cache(checks: int) -> None:
    decoder = CompiledDecoder(random_model("llama"))
    whole = decoder.forward(TOKENS, 1)
    decoder.forward([*TOKENS[:30], 3], 31)
    with pytest.raises(Cancelled):
        decoder.forward(TOKENS, 31, CancelAfter(checks))
    assert torch.equal(decoder.forward(TOKENS, 31), whole[30:])


def test_decoder_reads_a_long_text_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = CompiledDecoder(random_model("gemma2"))
    whole = decoder.forward(TOKENS, 1)
    monkeypatch.setattr("dsi.models.cpu.decoder.MAX_ROWS", 17)
    for start in (1, 20, 34, 35, 80, 81):
        decoder.clear_cache()
        assert torch.equal(decoder.forward(TOKENS, start).reshape(-1, 97), whole[start - 1 :])


def test_decoder_refuses_tokens_that_the_model_does_not_have() -> None:
    decoder = CompiledDecoder(random_model("llama"))
    for token in (97, -1):
        with pytest.raises(IndexError, match="must be below 97"):
            decoder.forward([1, token], 2)
    assert decoder.forward([1, 96], 2).shape == (1, 97)


def test_decoder_has_its_own_number_format_whatever_the_default() -> None:
    decoder = CompiledDecoder(random_model("mistral"))
    whole = decoder.forward(TOKENS, 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = CompiledDecoder(decoder.model)
        assert torch.equal(other.forward(TOKENS, 1), whole)
    finally:
        torch.set_default_dtype(torch.float32)


def test_decoder_uses_the_models_own_weights() -> None:
    model = random_model("gemma")
    decoder = CompiledDecoder(model)
    before = decoder.forward(TOKENS, 80)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    decoder.clear_cache()
    assert not torch.equal(decoder.forward(TOKENS, 80), before)


def test_decoder_can_be_copied() -> None:
    decoder = CompiledDecoder(random_model("llama"))
    whole = decoder.forward(TOKENS, 1)
    other = copy.deepcopy(decoder)
    with torch.no_grad():
        decoder.model.lm_head.weight.zero_()
    assert torch.equal(other.forward(TOKENS, 1), whole)


def test_decoder_computes_in_a_forked_process_with_threads() -> None:
    decoder = CompiledDecoder(random_model("llama")).with_threads(2)
    whole = decoder.forward(TOKENS, 1)  # has started a thread here, which does not survive
    if (pid := os.fork()) == 0:
        os._exit(0 if torch.equal(in_parts(decoder, [40, 40]), whole) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_decoder_gives_the_same_bits_in_huge_pages() -> None:
    model = random_model("llama tied", hidden_size=512, intermediate_size=1024)
    whole = CompiledDecoder(model).forward(TOKENS, 1)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    moved = move_to_huge_pages(model)
    assert moved.lm_head.weight.data_ptr() == moved.model.embed_tokens.weight.data_ptr()
    assert torch.equal(CompiledDecoder(moved).forward(TOKENS, 1), whole)


def test_decoder_supports_no_other_models() -> None:
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=97))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not CompiledDecoder.supports(gpt2)
    assert not CompiledDecoder.supports(random_model("llama", hidden_act="relu"))
    assert not CompiledDecoder.supports(random_model("llama", rope_parameters=dynamic))
    assert not CompiledDecoder.supports(random_model("llama", torch.float16))
    cut = random_model("llama")
    cut.model.layers = cut.model.layers[:2]
    assert not CompiledDecoder.supports(cut)
    pruned = random_model("llama")
    pruned.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 64, bias=False)
    assert not CompiledDecoder.supports(pruned)
    own = random_model("llama")
    own.__class__ = type("OwnForCausalLM", (hf.LlamaForCausalLM,), {})
    assert not CompiledDecoder.supports(own)
    mixed = random_model("llama")
    mixed.model.layers[0].self_attn.k_proj.bfloat16()
    assert not CompiledDecoder.supports(mixed)
    adapted = random_model("llama")
    adapted.model.layers[0].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[0].mlp.up_proj)
    assert not CompiledDecoder.supports(adapted)


def test_cpu_model_does_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("decoder", "transformer"):
        monkeypatch.setattr(f"dsi.models.cpu.{module}.why_unavailable", lambda: "there is no C compiler")
    assert type(cpu_model(random_model("llama"))) is LlamaCpu
    assert type(cpu_model(random_model("qwen2"))) is Transformer


def one_by_one(decoder: CompiledDecoder, text: list[int], count: int) -> list[int]:
    decoder.clear_cache()
    for _ in range(count):
        text = [*text, int(decoder.forward(text, len(text))[0].argmax())]
    return text[-count:]


@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_generates_in_one_call_what_it_generates_one_by_one(shape: str) -> None:
    decoder = CompiledDecoder(random_model(shape))
    for length in (1, 5, 60):
        text = TOKENS[:length]
        generated = one_by_one(decoder, text, 9)
        decoder.clear_cache()
        assert decoder.generate(text, 9) == generated
        assert decoder.generate([*text, *generated[:4]], 5) == generated[4:]  # cached
        other = [*text, *generated[:2], TOKENS[-1]]  # as after a rejection
        again = decoder.generate(other, 6)
        assert again == one_by_one(decoder, other, 6)
        rest = [*other, *again[:3]]
        assert torch.equal(decoder.forward(rest, 1), CompiledDecoder(decoder.model).forward(rest, 1))


def test_decoder_generates_after_a_text_of_several_forwards() -> None:
    long = [1 + number % 90 for number in range(400)]
    decoder = CompiledDecoder(random_model("llama", max_position_embeddings=512))
    assert decoder.generate(long, 4) == one_by_one(decoder, long, 4)


def test_decoder_generates_no_further_than_its_context_and_until_it_is_cancelled() -> None:
    decoder = CompiledDecoder(random_model("llama", max_position_embeddings=64))
    assert len(decoder.generate(TOKENS[:60], 5)) == 5
    with pytest.raises(ValueError, match="a text of 65 tokens: the model's context is 64"):
        decoder.generate(TOKENS[:60], 6)
    before = decoder.generate(TOKENS[:20], 3)
    with pytest.raises(Cancelled):
        decoder.generate(TOKENS[:22], 8, CancelAfter(2))
    assert decoder.generate(TOKENS[:20], 3) == before


def test_decoder_goes_on_after_a_generation_that_was_cancelled() -> None:
    """In any of its forwards: what those before it have cached is a part of the text."""
    decoder = CompiledDecoder(random_model("qwen3"))
    text = TOKENS[:20]
    generated = one_by_one(decoder, text, 4)
    whole = [*text, *generated]
    ended = []
    for checks in range(14):
        decoder.clear_cache()
        try:
            assert decoder.generate(text, 4, CancelAfter(checks)) == generated
        except Cancelled:
            ended.append(checks)
        rest = whole[: 21 + checks % 4]
        assert torch.equal(decoder.forward(rest, len(rest)), CompiledDecoder(decoder.model).forward(rest, len(rest)))
        assert decoder.generate(whole[:22], 2) == generated[2:]
    assert ended == list(range(3 * 4))  # before each layer of each forward


def varied() -> CompiledDecoder:
    """A model whose greedy texts do not soon repeat one token: its layers change more than the embeddings have."""
    model = random_model("llama biases", hidden_size=48, head_dim=40)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.mul_(8)
            layer.mlp.up_proj.weight.mul_(8)
            layer.mlp.down_proj.weight.mul_(8)
    return CompiledDecoder(model)


VARIED = varied()


def asked(*texts: list[int]) -> list[ForwardRequest]:
    """Requests for the token after each text."""
    return [ForwardRequest(text, len(text)) for text in texts]


def stopped() -> StopFlag:
    flag = StopFlag()
    flag.set()
    return flag


def check_goes_on(decoder: CompiledDecoder, *texts: list[int]) -> None:
    """All tokens but the last of each are cached, and give the bits that they would have been given at once."""
    assert [decoder.num_cached(text) for text in texts] == [len(text) - 1 for text in texts]
    for text, logits in zip(texts, decoder.forward_packed(asked(*texts))):
        assert torch.equal(logits, CompiledDecoder(decoder.model).forward(text, len(text)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_generate_packed_gives_each_text_what_it_generates_one_by_one(shape: str, dtype: str) -> None:
    model = random_model(shape, torch.float32 if dtype == "float32" else torch.bfloat16)
    model = quantize_int8(model) if dtype == "int8" else model
    alone, counts = CompiledDecoder(model), (9, 1, 6, 4, 6)
    texts = [TOKENS[:1], TOKENS[:60], TOKENS[20:43], TOKENS[::-1][:5], [*TOKENS[:9], 3]]
    expected = [tuple(one_by_one(alone, text, count)) for text, count in zip(texts, counts)]
    for threads in (1, 2):
        packed = CompiledDecoder(model, 8, threads)
        assert packed.generate_packed(asked(*texts), counts, 1, StopFlag()) == expected
        assert packed.generate_packed(asked(texts[1]), [1], 1, StopFlag()) == expected[1:2]  # what was cached before
        check_goes_on(packed, *([*text, *tokens] for text, tokens in zip(texts, expected)))
        again = [[*text, *tokens[:-1]] for text, tokens in zip(texts, expected)]
        assert packed.generate_packed(asked(*again), (3,) * 5, 1, StopFlag()) == [
            tuple(one_by_one(alone, text, 3)) for text in again
        ]


@given(st.data())
@settings(max_examples=25)
def test_generate_packed_gives_the_same_tokens_for_any_packing(data: st.DataObject) -> None:
    """Texts that share prefixes come and go, are cut back and verified, and some stop early."""
    packed = VARIED.with_threads(data.draw(st.integers(1, 2)), 8)
    texts: list[list[int]] = [[1 + i] for i in range(5)]
    for _ in range(data.draw(st.integers(1, 5))):
        numbers = data.draw(st.lists(st.sampled_from(range(5)), min_size=1, unique=True))
        for i in numbers:
            if data.draw(st.booleans()):
                end = data.draw(st.integers(1, 50))
                texts[i][:] = [*TOKENS[:end]] if i < 3 else [*TOKENS[: end // 2], *range(1, end - end // 2 + 1)]
        own = [texts[i] for i in numbers]
        if data.draw(st.booleans()):
            packed.forward_packed([ForwardRequest(text, 1 + len(text) // 2) for text in own])
        counts = [data.draw(st.integers(1, 5)) for _ in own]
        stop = stopped() if data.draw(st.booleans()) else StopFlag()
        generated = packed.generate_packed(asked(*own), counts, 1, stop)
        assert generated is not None
        for text, tokens, count in zip(own, generated, counts):
            assert len(tokens) == (1 if stop.is_set() else count)
            assert list(tokens) == one_by_one(VARIED, text, len(tokens))
            text += tokens
            text[64:] = []


TREE = ((END, 4), (0, 9), (END, 6), (2, 11))


def test_generate_packed_goes_on_after_trees() -> None:
    """With a path of a tree, or without one: what is cached behind the text is overwritten."""
    packed = VARIED.with_threads(1, 8)
    texts = [[*TOKENS[:30]], [*TOKENS[40:61]], [*TOKENS[10:20]]]

    def verify_trees() -> list[torch.Tensor]:
        return packed.forward_packed([ForwardRequest(text, len(text), tree=TREE, asked=[0, 1, 2, 3]) for text in texts])

    verify_trees()
    for text, path in zip(texts, ([6, 11], [4, 7], [8])):  # to its end, in part, and not at all
        text += path
    generated = packed.generate_packed(asked(*texts), (5, 3, 4), 1, StopFlag())
    assert generated == [tuple(one_by_one(VARIED, text, count)) for text, count in zip(texts, (5, 3, 4))]
    for text, tokens in zip(texts, generated):
        text += tokens
    check_goes_on(packed, *texts)
    fresh = VARIED.with_threads(1, 8)
    for text, logits in zip(texts, verify_trees()):
        [expected] = fresh.forward_packed([ForwardRequest(text, len(text), tree=TREE, asked=[0, 1, 2, 3])])
        assert torch.equal(logits, expected)


def test_generate_packed_gives_one_token_of_each_text_where_it_is_to_stop() -> None:
    packed = VARIED.with_threads(1, 8)
    texts = [TOKENS[:30], TOKENS[40:45]]
    whole = [[*text, *one_by_one(VARIED, text, 6)] for text in texts]
    assert packed.generate_packed(asked(*texts), (6, 5), 1, stopped()) == [(whole[0][30],), (whole[1][5],)]
    check_goes_on(packed, whole[0][:31], whole[1][:6])
    rest = packed.generate_packed(asked(whole[0][:31], whole[1][:6]), (5, 1), 1, StopFlag())
    assert rest == [tuple(whole[0][31:]), (whole[1][6],)]


def test_generate_packed_has_room_for_what_it_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a text that has fewer tokens left ends long before the others."""
    monkeypatch.setattr("dsi.models.kv_sequence.GROWTH", 0)
    packed, texts, counts = VARIED.with_threads(1, 8), [TOKENS[:3], TOKENS[5:6], TOKENS[:50]], (70, 2, 40)
    generated = packed.generate_packed(asked(*texts), counts, 1, StopFlag())
    assert generated == [tuple(one_by_one(VARIED, text, count)) for text, count in zip(texts, counts)]
    check_goes_on(packed, *([*text, *tokens] for text, tokens in zip(texts, generated)))


def test_generate_packed_has_memory_for_its_longest_forward() -> None:
    packed, text = VARIED.with_threads(2, 8), TOKENS[:2]
    [tokens] = packed.generate_packed(asked(text), [120], 1, StopFlag())  # type: ignore[misc]
    [used], whole = packed._scratch, [*text, *tokens]
    packed._scratch = []
    packed.forward_packed(asked(whole))  # all but one of which is cached
    assert len(used) >= len(packed._scratch[0])


class Noted(CompiledDecoder):
    """Notes which KV caches are said to be in use while it generates."""

    noted: frozenset[KVSequence] = frozenset()

    def _generate(self, parts: Any, *arguments: Any) -> list[list[int]]:
        self.noted = frozenset(self._in_use)
        return super()._generate(parts, *arguments)


def test_generate_packed_leaves_the_cache_of_a_text_that_is_computed() -> None:
    """As another thread does: its own are in use, too."""
    packed, text, other = Noted(VARIED.model, 32), TOKENS[:30], [*TOKENS[:25], 1]
    packed.forward_packed(asked(text))
    [sequence] = packed._sequences
    packed._in_use.add(sequence)
    generated = packed.generate_packed(asked(other), [4], 1, StopFlag())
    assert generated == [tuple(one_by_one(VARIED, other, 4))]
    assert sequence.tokens == text
    assert packed.noted == set(packed._sequences)
    assert len(packed.noted) == 2
    assert packed._in_use == {sequence}
    check_goes_on(packed, [*other, *generated[0]])


def test_generate_packed_leaves_new_tokens_of_more_than_a_forward_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = VARIED.with_threads(1, 8)
    monkeypatch.setattr("dsi.models.cpu.decoder.MAX_ROWS", 17)
    texts, counts = [TOKENS[:10], TOKENS[20:28]], (4, 2)
    expected = [tuple(one_by_one(VARIED, text, count)) for text, count in zip(texts, counts)]
    assert packed.generate_packed(asked(*texts), counts, 1, StopFlag()) is None
    assert packed._in_use == set()
    answers = generate_packed(SamplingModel(packed), asked(*texts), counts, 1, StopFlag())
    assert answers == list(map(Answer, expected))
    shorter = [text[:-1] for text in texts]  # of which all is cached
    assert packed.generate_packed(asked(*shorter), (1, 1), 1, StopFlag()) is not None


def test_generate_packed_refuses_a_bad_text_before_it_computes() -> None:
    decoder = CompiledDecoder(random_model("llama", max_position_embeddings=64), 8)
    expected = tuple(one_by_one(decoder, TOKENS[:60], 5))
    short = [1, 2]
    assert decoder.generate_packed(asked(short, TOKENS[:60]), (1, 5), 1, StopFlag()) == [
        tuple(one_by_one(CompiledDecoder(decoder.model), short, 1)),
        expected,
    ]
    with pytest.raises(ValueError, match="a text of 65 tokens: the model's context is 64"):
        decoder.generate_packed(asked(short, TOKENS[:60]), (9, 6), 1, StopFlag())
    with pytest.raises(IndexError, match="must be below 97"):
        decoder.generate_packed(asked([*TOKENS[:60], 5], [3, 97]), (2, 2), 1, StopFlag())
    assert decoder._in_use == set()
    whole = [*TOKENS[:60], *expected[:-1]]
    assert decoder.num_cached(whole) == 64
    assert torch.equal(decoder.forward(whole, 64), CompiledDecoder(decoder.model).forward(whole, 64))


def test_generate_packed_at_once_gives_each_text_what_it_has_alone() -> None:
    """Texts of both begin with the same tokens, so that each looks for what the other has cached."""
    packed = VARIED.with_threads(2, 32)
    halves = [[[*TOKENS[:20], *range(1, 4 + i)] for i in range(j, 8, 2)] for j in range(2)]

    def write(texts: list[list[int]]) -> list[list[int]]:
        for step in range(1, 7):
            counts = [1 + (step + i) % 6 for i in range(len(texts))]
            generated = packed.generate_packed(asked(*texts), counts, 2, stopped() if step == 3 else StopFlag())
            assert generated is not None
            for text, tokens in zip(texts, generated):
                text += tokens
        return texts

    with ThreadPoolExecutor(2) as threads:
        written = list(threads.map(write, halves))
    for j in range(2):
        for i, text in zip(range(j, 8, 2), written[j]):
            prompt = [*TOKENS[:20], *range(1, 4 + i)]
            assert text == [*prompt, *one_by_one(VARIED, prompt, len(text) - len(prompt))]


def test_sampling_model_generates_in_one_call_where_all_are_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = SamplingModel(VARIED.with_threads(1, 8)), (5, 2, 7)
    samplings = Sampling(), Sampling(0.9, seed=2), Sampling(repetition_penalty=1.4)
    texts = [TOKENS[:12], TOKENS[:12], TOKENS[30:33]]
    written = []
    for text, sampling, count in zip(texts, samplings, counts):
        tokens = list(text)
        for _ in range(count):
            tokens += model.answer(ForwardRequest(tokens, len(tokens), sampling=sampling, prompt_length=2))
        written.append(tuple(tokens[len(text) :]))
    requests = [
        ForwardRequest(text, len(text), sampling=sampling, prompt_length=2) for text, sampling in zip(texts, samplings)
    ]
    for at_once in (1, 2):
        assert generate_packed(model, requests, counts, at_once, StopFlag()) == list(map(Answer, written))
    assert generate_packed(model, requests, counts, 1, stopped()) == [Answer(tokens[:1]) for tokens in written]
    for name in ("forward_packed", "pick_packed"):
        monkeypatch.delattr(CompiledDecoder, name)
    [answer] = generate_packed(model, requests[:1], counts[:1], 1, StopFlag())
    assert answer == Answer(written[0])


def test_packed_server_generates_the_texts_of_a_compiled_decoder() -> None:
    """Forwards that follow one another, and one beside a verification and a text that is sampled."""
    server = PackedServer.of(Server("target-1", "target", SamplingModel(VARIED.with_threads(1, 32))))
    assert server is not None
    server.steps_for, server.tells_meanwhile = lambda _: 5, True
    prompts = [TOKENS[:3], TOKENS[:9], TOKENS[50:62], [7]]
    counts = [7, 3, 12, 5]
    whole = [[*prompt, *one_by_one(VARIED, prompt, count)] for prompt, count in zip(prompts, counts)]
    for id, (prompt, count) in enumerate(zip(prompts, counts)):
        server.add(Draft(id, TokenSequence.of(prompt), count, TARGET, alone=True))
    events = [event for *_, event in server.step()]
    assert events == [
        DraftedBlock(id, tuple(text[len(prompt) : len(prompt) + 5]))
        for id, (prompt, text) in enumerate(zip(prompts, whole))
    ]
    server.add(Verify(4, TokenSequence.of(TOKENS[:9]), 2))
    sampled = Sampling(0.8, seed=3)
    server.add(Draft(5, TokenSequence.of(TOKENS[:4]), 1, TARGET, sampled, alone=True))
    alone = SamplingModel(CompiledDecoder(VARIED.model))
    assert [event for *_, event in server.step()] == [
        Drafted(0, whole[0][3 + 5]),
        Drafted(2, whole[2][12 + 5]),
        Verified(4, alone.answer(ForwardRequest(TOKENS[:9], 8))),
        Drafted(5, alone.answer(ForwardRequest(TOKENS[:4], 4, sampling=sampled))[0]),
    ]
    assert [event for *_, event in server.step()] == [
        Drafted(0, whole[0][3 + 6]),
        DraftedBlock(2, tuple(whole[2][12 + 6 : 12 + 11])),
    ]
    assert [event for *_, event in server.step()] == [Drafted(2, whole[2][12 + 11])]
    assert server.jobs == {}
