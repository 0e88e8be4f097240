"""What transformers' `generate` is given, DSI honours or refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DynamicCache,
    EosTokenCriteria,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)

import dsi
from dsi.core.messages import Sampling
from dsi.core.policies import policy_for, speculative
from dsi.core.spec import SpecConfig
from dsi.engine import hf_generate
from dsi.engine.hf_generate import split_sampling
from dsi.fleets.loop import ActiveRequest, EngineLoop
from dsi.models.names import model_path

IDS = torch.tensor([[1, 5, 9, 20]])
EOS = 7
VOCAB = 61


def tiny_llama(seed: int, vocab: int = VOCAB) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=128, **shape, **tokens)).eval()


TARGET, DRAFTER = tiny_llama(0), tiny_llama(1)


def plain(**options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "max_new_tokens": 20} | options
    return TARGET.generate(options.pop("ids", IDS), **options)


def by_dsi(**options: Any) -> Any:
    return plain(**{"custom_generate": dsi.custom_generate, "drafter": DRAFTER} | options)


class Shift(LogitsProcessor):  # type: ignore[misc]
    """Prefers the token two after the last one, more so the longer the text is."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, (int(input_ids[0, -1]) + 2) % VOCAB] += 0.05 * input_ids.shape[1]
        return scores


class After(StoppingCriteria):  # type: ignore[misc]
    """Ends a text after the first token that is a multiple of `divisor`, and counts how often it was asked."""

    def __init__(self, divisor: int) -> None:
        self.divisor, self.calls = divisor, 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None
        self.calls += 1
        return input_ids[:, -1] % self.divisor == 0


class Recorder:
    """A streamer that notes what it is given."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.parts.append(value.tolist())

    def end(self) -> None:
        self.parts.append("end")


PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[4], [52, 47]]},
    {"suppress_tokens": [5, 8]},
    {"begin_suppress_tokens": [5]},
    {"forced_eos_token_id": EOS},
    {"sequence_bias": {(5,): -10.0, (8, 33): -10.0}},
    {"exponential_decay_length_penalty": (3, 1.5)},
    {"encoder_repetition_penalty": 0.2},
    {"eos_token_id": [52, 4], "min_new_tokens": 9},
    {"eos_token_id": 33, "min_length": 13, "suppress_tokens": [33]},
    {"prefix_allowed_tokens_fn": lambda _, ids: list(range(int(ids[-1]) % 5, VOCAB, 3))},
    {"logits_processor": [Shift()]},
    {"logits_processor": [Shift()], "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"watermarking_config": WatermarkingConfig(bias=3.0)},
]


@pytest.mark.parametrize("options", PROCESSED, ids=lambda options: "+".join(options))
def test_custom_generate_processes_logits_as_transformers(options: dict[str, Any]) -> None:
    expected = plain(**options)
    assert torch.equal(by_dsi(**options), expected)
    assert expected.tolist() != plain().tolist()  # it has an effect


def test_custom_generate_processes_logits_of_several_targets_and_other_architectures() -> None:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 128, "vocab_size": VOCAB}
    target, drafter = (GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=0)).eval() for _ in range(2))
    options: dict[str, Any] = {"repetition_penalty": 1.4, "max_new_tokens": 20, "pad_token_id": 0, "do_sample": False}
    ids = torch.tensor([[0, 0, 1, 5, 9, 20]])
    options["attention_mask"] = (ids != 0).long()
    ours = target.generate(ids, custom_generate=dsi.custom_generate, drafter=drafter, sp=2, **options)
    assert torch.equal(ours, target.generate(ids, **options))


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"min_length": 15, "eos_token_id": 33}])
def test_custom_generate_keeps_padding_on_the_left(options: dict[str, Any]) -> None:
    padded = torch.tensor([[0, 0, 0, *IDS[0].tolist()]])
    options = {**options, "ids": padded, "attention_mask": (padded != 0).long()}
    ours = by_dsi(**options)
    assert torch.equal(ours, plain(**options))
    assert ours[0, :7].tolist() == padded[0].tolist()
    assert torch.equal(by_dsi(**{**options, "attention_mask": None}), ours)  # transformers finds the padding itself


ALGORITHMS = ("nonsi", "si", "dsi")
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "repetition_penalty": 1.5, "logits_processor": [Shift()]},
    {"temperature": 0.8, "typical_p": 0.5, "min_p": 0.01, "renormalize_logits": True},
]


@pytest.mark.parametrize("options", SAMPLED, ids=lambda options: "+".join(options))
def test_custom_generate_gives_one_text_per_seed(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for algorithm, seed in (*((name, 1) for name in ALGORITHMS), ("dsi", 2)):
        policy = policy_for(SpecConfig(algorithm, 3, min_draft=0, max_lead=8))
        monkeypatch.setattr(hf_generate, "choose_policy", lambda *_, policy=policy: policy)
        texts.append(by_dsi(**options, do_sample=True, seed=seed)[0].tolist())
    *same, other = texts
    assert same == [same[0]] * len(ALGORITHMS)
    assert other != same[0]


def test_custom_generate_samples_from_what_processors_leave() -> None:
    allowed = {11, 12, 13}
    ids = by_dsi(do_sample=True, suppress_tokens=[i for i in range(VOCAB) if i not in allowed], typical_p=0.9)
    assert set(ids[0, 4:].tolist()) <= allowed


def test_custom_generate_processes_the_drafter_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[ActiveRequest] = []

    class Loop(EngineLoop):
        def submit(self, request: Any) -> ActiveRequest:
            requests.append(super().submit(request))
            return requests[-1]

    monkeypatch.setattr(hf_generate, "EngineLoop", Loop)
    monkeypatch.setattr(hf_generate, "choose_policy", lambda *_: speculative(2))
    by_dsi(drafter=tiny_llama(0), repetition_penalty=1.5, logits_processor=[Shift()])
    assert "corrected" not in requests[0].completion().origins  # its twin drafts what the target writes
    assert "accepted" in requests[0].completion().origins


def test_custom_generate_takes_a_drafter_with_more_tokens_than_processors_know() -> None:
    options: dict[str, Any] = {"sequence_bias": {(5,): -10.0}, "suppress_tokens": [8]}
    assert torch.equal(by_dsi(drafter=tiny_llama(1, VOCAB - 6), **options), plain(**options))


@pytest.mark.parametrize(
    "criteria",
    [
        [After(13)],
        [After(999), After(47)],
        [MaxLengthCriteria(9)],
        [MaxLengthCriteria(2)],
        [EosTokenCriteria(52)],
        [EosTokenCriteria([12, 47]), After(99)],
    ],
)
def test_custom_generate_stops_by_criteria(criteria: list[Any]) -> None:
    expected = plain(stopping_criteria=criteria)
    assert torch.equal(by_dsi(stopping_criteria=criteria), expected)
    assert expected.shape[1] < plain().shape[1] or isinstance(criteria[0], MaxLengthCriteria)


def test_custom_generate_asks_criteria_once_per_token() -> None:
    criterion = After(47)
    ids = by_dsi(stopping_criteria=[criterion])
    assert ids[0, -1] == 47
    assert criterion.calls == ids.shape[1] - IDS.shape[1]


def test_custom_generate_stops_in_time_and_at_strings() -> None:
    assert by_dsi(max_time=0.0).shape[1] == IDS.shape[1] + 1
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    options = {"tokenizer": tokenizer, "stop_strings": tokenizer.decode([47])}
    assistant = {"assistant_model": DRAFTER, "custom_generate": dsi.REPO, "trust_remote_code": True}
    expected = plain(**options)
    assert torch.equal(plain(**assistant, **options), expected)
    assert expected.shape[1] < plain().shape[1]


@pytest.mark.parametrize("options", [{}, {"stopping_criteria": [After(47)]}])
def test_custom_generate_streams_token_by_token(options: dict[str, Any]) -> None:
    theirs, ours, from_repo = Recorder(), Recorder(), Recorder()
    expected = plain(streamer=theirs, **options)
    assert torch.equal(by_dsi(streamer=ours, **options), expected)
    assistant = {"assistant_model": DRAFTER, "custom_generate": dsi.REPO, "trust_remote_code": True}
    plain(streamer=from_repo, **assistant, **options)
    assert theirs.parts == ours.parts == from_repo.parts
    assert len(theirs.parts) == 1 + expected.shape[1] - IDS.shape[1] + 1


def test_custom_generate_returns_a_dict_if_asked() -> None:
    output = by_dsi(return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(return_dict_in_generate=True).sequences)
    assert type(output) is type(plain(return_dict_in_generate=True))
    assert torch.equal(by_dsi(output_scores=True), plain())  # which transformers ignores as well


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams=2 is not supported"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ({"dola_layers": "low"}, "dola_layers=low"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True is not supported"),
    ({"return_dict_in_generate": True, "output_logits": True}, "output_logits=True"),
    ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions=True"),
    ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True"),
    ({"past_key_values": DynamicCache()}, "past_key_values is not supported"),
    ({"position_ids": torch.tensor([[3, 4, 5, 6]])}, "position_ids other than 0 to 3"),
    ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask has 1 zeros among 4"),
    ({"inputs_embeds": torch.zeros(1, 4, 16)}, "inputs_embeds is not supported"),
    ({"ids": IDS.repeat(2, 1), "attention_mask": None}, "2 texts at once"),
    ({"drafter": None}, "needs a drafter"),
    ({"drafter": LlamaForCausalLM(DRAFTER.config).to("meta")}, "the drafter is on meta"),
    ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)}, "keeps a state"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_custom_generate_refuses_by_name(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        by_dsi(**options)


def test_custom_generate_refuses_what_is_no_decoder_or_no_generate() -> None:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    t5 = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))
    with pytest.raises(ValueError, match="the model has an encoder"):
        t5.generate(IDS, custom_generate=dsi.custom_generate, drafter=DRAFTER, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"is called by model\.generate"):
        dsi.custom_generate(TARGET, IDS, drafter=DRAFTER)
    with pytest.raises(ValueError, match="assistant_tokenizer is not supported"):
        plain(assistant_model=DRAFTER, assistant_tokenizer=1, custom_generate=dsi.REPO, trust_remote_code=True)


def test_split_sampling_takes_parameters_from_the_end_of_the_list() -> None:
    temperature, top_k, top_p, typical = (
        TemperatureLogitsWarper(0.5),
        TopKLogitsWarper(4),
        TopPLogitsWarper(0.9),
        TypicalLogitsWarper(0.5),
    )
    penalty = Shift()
    assert split_sampling([penalty], False, 3) == ([penalty], Sampling())
    assert split_sampling([penalty, temperature, top_k, top_p], True, 3) == ([penalty], Sampling(0.5, 4, 0.9, seed=3))
    assert split_sampling([], True, 3) == ([], Sampling(1.0, seed=3))
    for kept in ([temperature, top_k, typical], [top_k, temperature], [temperature, temperature]):
        assert split_sampling(kept, True, 3) == (kept, Sampling(1.0, seed=3))
    assert split_sampling([typical, top_k], True, 3) == ([typical], Sampling(1.0, 4, seed=3))
