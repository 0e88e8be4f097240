"""Text in, text out: the built-in pair in real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from dsi.core.spec import ALGORITHMS, SpecConfig
from dsi.engine.build import build
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.models.names import model_path

pytestmark = pytest.mark.slow

PROMPTS = ("Once upon a time", "Tom and his dog", "One day a dragon")


@pytest.fixture(scope="module", params=[1, 2, 3])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(sp=request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What transformers' own greedy generation writes."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    model = AutoModelForCausalLM.from_pretrained(model_path("builtin", "target"), dtype=torch.float32)
    texts = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        text = model.generate(**ids, do_sample=False, max_new_tokens=60)[0, ids["input_ids"].shape[1] :]
        texts[prompt] = tokenizer.decode(text, skip_special_tokens=True)
    return texts


def test_engine_writes_what_transformers_writes(engine: Engine, expected: dict[str, str]) -> None:
    for prompt in PROMPTS:
        for algorithm in ALGORITHMS:
            done = engine.generate(prompt, max_new_tokens=60, algorithm=algorithm)
            assert done.text == expected[prompt]


def test_engine_gives_one_text_per_seed(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 50, "temperature": 1.0, "top_p": 0.95, "seed": 7}
    texts = {engine.generate(PROMPTS[0], algorithm=name, **options).text for name in ALGORITHMS}
    assert len(texts) == 1
    assert engine.generate(PROMPTS[0], **options | {"seed": 8}).text not in texts


TEXTS_BY_RULE: dict[str, set[str]] = {"reject": set(), "block": set(), "specinfer": set()}


@pytest.mark.parametrize("rule", TEXTS_BY_RULE)
def test_engine_gives_one_text_per_rule_for_any_sp(engine: Engine, rule: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 7, "lookahead": 3}
    for top_p in (1.0, 0.9):  # whole rows of logits are sent, and parts of them
        text = engine.generate(PROMPTS[0], rule=rule, top_p=top_p, **options).text
        TEXTS_BY_RULE[rule].add(text)
    assert len(TEXTS_BY_RULE[rule]) <= 2


def test_engine_writes_on_when_a_target_is_killed(engine: Engine, expected: dict[str, str]) -> None:
    stream = engine.stream(PROMPTS[0], max_new_tokens=60)
    parts = []
    for part in stream:
        parts.append(part)
        if len(parts) == 3:
            process = engine.fleet._workers["target-1"].process  # type: ignore[attr-defined]
            os.kill(process.pid, signal.SIGKILL)
    assert "".join(parts) == expected[PROMPTS[0]]


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with Engine.load() as loaded:
        yield loaded


def test_completion_has_times_and_tally(one: Engine) -> None:
    done = one.generate(PROMPTS[0], max_new_tokens=30)
    assert (done.finish_reason, len(done.tokens), len(done.times)) == ("length", 30, 30)
    assert 0 < done.ttft <= done.elapsed
    assert done.tpot > 0
    assert done.tally.accepted > 0
    assert done.prompt == one.tokenizer.encode(PROMPTS[0])


def test_completion_has_logprobs(one: Engine) -> None:
    texts = [one.generate(PROMPTS[0], max_new_tokens=12, logprobs=2, algorithm=name) for name in ("nonsi", "dsi")]
    for done in texts:
        assert [note[0][0] for note in done.top_logprobs] == list(done.tokens)  # greedy: the likeliest is chosen
        assert [len(note) for note in done.top_logprobs] == [2] * 12
    logs = [[log for note in done.top_logprobs for _, log in note] for done in texts]
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)


def test_engine_ends_before_a_stop_string(one: Engine) -> None:
    whole = one.generate(PROMPTS[0], max_new_tokens=60).text
    done = one.generate(PROMPTS[0], max_new_tokens=60, stop=["play outside", "nowhere to be found"])
    assert (done.finish_reason, done.text) == ("stop", whole[: whole.index("play outside")])
    assert "play outside" in one.tokenizer.decode(done.tokens)
    for algorithm in ALGORITHMS:
        other = one.generate(PROMPTS[0], max_new_tokens=60, stop="play outside", algorithm=algorithm)
        assert (other.tokens, len(other.times)) == (done.tokens, len(done.tokens))


def test_engine_ends_at_the_end_token(one: Engine) -> None:
    done = one.generate(PROMPTS[0], max_new_tokens=400)
    assert done.finish_reason == "stop"
    assert done.tokens[-1] in one.tokenizer.eos_token_ids


def test_engine_stays_within_the_context(one: Engine) -> None:
    assert len(one.generate((5,) * 500, max_new_tokens=100).tokens) <= 12
    with pytest.raises(ValueError, match="maximum context length is 512 tokens, but the prompt has 600 and"):
        one.generate((5,) * 600)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ((5, 10**9), "token 1000000000: the target's tokens are 0 to 4095"),
        ((5, 4096), "token 4096: the target's tokens are 0 to 4095"),
        ((-1, 5), "token -1: the target's tokens are 0 to 4095"),
        ((), "an empty prompt: must have at least one token"),
    ],
)
def test_engine_refuses_tokens_that_the_target_does_not_have(
    one: Engine, prompt: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        one.generate(prompt)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        one.score_request(prompt, 1)


def save_llama(folder: Path, context: int, seed: int = 0) -> str:
    """Save a tiny model with the built-in pair's tokenizer."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=4096, max_position_embeddings=context, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_path("builtin", "target")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def short_drafters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A target with a context of 96, and two drafters, of which one has 12 and the other 48."""
    folder = tmp_path_factory.mktemp("models")
    target, *drafters = [save_llama(folder / str(context), context) for context in (96, 12, 48)]
    with Engine.load(target, drafters, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("prompt", [4, 40, 90])
def test_engine_goes_on_without_a_drafter_at_its_context(short_drafters: Engine, prompt: int) -> None:
    specs = [*map(SpecConfig, (*ALGORITHMS, "auto")), SpecConfig("dsi", 3, min_draft=2)]
    texts = [short_drafters.generate((7,) * prompt, max_new_tokens=100, spec=spec) for spec in specs]
    assert {text.tokens for text in texts} == {texts[0].tokens}
    assert {(len(text.tokens), text.finish_reason) for text in texts} == {(96 - prompt, "length")}
    assert {text.tally.failed for text in texts} == {0}
    assert (texts[1].tally.drafted > 0) == (prompt < 12)
    assert (texts[-1].tally.drafted > 0) == (prompt < 48)  # which waits for draft tokens before it verifies


def test_engine_keeps_the_names_of_the_last_release(one: Any) -> None:
    assert one.text is one.tokenizer
    assert one.loaded is one.deployment
    assert one.plan == one.plans == ()
    assert one.run == one.loop.run
    with pytest.raises(AttributeError, match="nonsense"):
        _ = one.nonsense


def test_engine_chooses_the_lookahead_by_eq_1(one: Engine) -> None:
    latency = one.deployment.latency
    assert 0 < latency.drafter_ms < 0.5 * latency.target_ms
    assert one.deployment.lookahead("dsi") >= 2


def test_engine_refuses_impossible_requests(one: Engine, tmp_path: Path) -> None:
    for options, sentence in (
        ({"algorithm": "magic"}, "algorithm 'magic'"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            one.generate("Once", **options)
    for loading, sentence in (
        ({"sp": 0}, "SP degree 0"),
        ({"lookahead": "many"}, "lookahead 'many'"),
        ({"lookahead": 0}, "lookahead 0"),
        ({"target": str(tmp_path / "none")}, "there is no such model folder"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Engine.load(**loading)


def test_build_refuses_another_vocabulary(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"another vocabulary \(4097 tokens\) than the target builtin \(4096"):
        build(EngineConfig(drafter=(str(tmp_path),), vocab="same"))


@pytest.mark.parametrize("drafter", ["ngram", ["builtin", "ngram"]])
def test_engine_drafts_with_ngram(drafter: str | list[str], expected: dict[str, str]) -> None:
    stages: list[str] = []
    with Engine.load(drafter=drafter, status=stages.append) as engine:
        assert stages[0].startswith("loading target builtin, ")
        assert stages[-2:] == [f"starting {3 if 'builtin' in drafter else 2} servers", "measuring the models"]
        for algorithm in ("si", "dsi"):
            assert engine.generate(PROMPTS[0], max_new_tokens=60, algorithm=algorithm).text == expected[PROMPTS[0]]


@pytest.mark.parametrize("role", ["builtin", "gpt2"])
def test_custom_generate_writes_what_transformers_writes(role: str) -> None:
    import dsi

    if role == "builtin":
        target, drafter = (
            AutoModelForCausalLM.from_pretrained(model_path("builtin", r)) for r in ("target", "drafter")
        )
        target, drafter = target.float(), drafter.float()
    else:
        torch.manual_seed(0)
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 128, "vocab_size": 97}
        target, drafter = (GPT2LMHeadModel(GPT2Config(**shape)).eval() for _ in range(2))
    ids = torch.tensor([[1, 5, 9, 20]])
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": 24,
        "pad_token_id": 0,
    }
    plain = target.generate(ids, **options)
    assert torch.equal(
        target.generate(ids, custom_generate=dsi.custom_generate, drafter=drafter, sp=2, **options), plain
    )
    assistant = {"assistant_model": drafter, "custom_generate": dsi.REPO, "trust_remote_code": True}
    assert torch.equal(target.generate(ids, **assistant, **options), plain)
    assert torch.equal(target.generate(ids, **options), plain)  # the model is as it was
    with pytest.raises(ValueError, match="2 texts at once"):
        dsi.custom_generate(target, ids.repeat(2, 1), drafter=drafter)
    with pytest.raises(ValueError, match="needs a drafter"):
        dsi.custom_generate(target, ids)


def test_custom_generate_ends_at_the_targets_context() -> None:
    import dsi

    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 97, "eos_token_id": None, "bos_token_id": None}
    target, drafter = (GPT2LMHeadModel(GPT2Config(**shape, n_positions=n)).eval() for n in (64, 32))
    ids = torch.arange(40)[None]  # more than the drafter's context
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, max_new_tokens=24, **options)
    with pytest.warns(UserWarning, match="the text ends at the target's context of 64 tokens"):
        text = target.generate(ids, max_new_tokens=100, custom_generate=dsi.custom_generate, drafter=drafter, **options)
    assert torch.equal(text, plain)
    with pytest.raises(ValueError, match="a prompt of 64 tokens, and the target's context is 64"):
        target.generate(torch.arange(64)[None], max_new_tokens=4, custom_generate=dsi.custom_generate, drafter=drafter)


def test_stream_is_read_once(engine: Engine) -> None:
    stream = engine.stream("Tom", max_new_tokens=8)
    first = "".join(stream)
    assert first
    assert "".join(stream) == ""
    assert stream.completion.text == first
