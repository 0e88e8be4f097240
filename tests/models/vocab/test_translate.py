"""Any target with any drafter: the text is the target's own, and the translation is chosen well."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from command import dsi
from dsi.core.generation import Policy
from dsi.core.messages import GREEDY, Sampling
from dsi.core.policies import autoregressive, distributed, speculative
from dsi.core.request import Completion, Request
from dsi.engine.build import build
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.protocol import ForwardRequest, Model, SamplingModel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.slem import SLEM
from dsi.models.vocab.tli import TLI
from dsi.models.vocab.translate import MIN_SHARED_RATE, shared_token_rate, translate_drafter
from dsi.models.vocab.vocabulary import Vocabulary
from dsi.models.wait import Latency, Wait
from sample_tokenizers import MAKERS, llama, sample_tokenizer, vocabulary

pytestmark = pytest.mark.slow

PROMPTS = ("Once upon a time", "🙂 def f(x):\n\treturn 1\n\n", "雪が降る。北京", "")
TARGETS = ("byte_level", "byte_fallback", "metaspace")
CONTEXT, LENGTH = 256, 20


def drafter_of(method: str, drafter: str, target: str) -> Model:
    pair = vocabulary(drafter), vocabulary(target)
    return translate_drafter(method, LlamaCpu(llama(drafter, seed=1)), *pair, CONTEXT, drafter)


def prompt_of(target: str, text: str) -> tuple[int, ...]:
    return tuple(sample_tokenizer(target).encode(text)) or (1,)


@cache
def greedy_text(target: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The text of transformers' own greedy generation."""
    ids = torch.tensor([prompt])
    text = llama(target).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LENGTH,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(text[0, len(prompt) :].tolist())


def run(
    target: str, drafter: Model, prompt: tuple[int, ...], policy: Policy, sampling: Sampling = GREEDY
) -> Completion:
    verifier = SamplingModel(LlamaCpu(llama(target)))
    servers = [Server(f"target-{i}", "target", Wait(verifier, Latency(7.0))) for i in range(2)]
    servers.append(Server("drafter", "drafter", Wait(drafter, Latency(1.0))))
    [done] = EngineLoop(SimulatedFleet(servers)).run(Request(prompt, LENGTH, policy, sampling))
    return done


@pytest.mark.parametrize("method", ["tli", "slem"])
@pytest.mark.parametrize("target", TARGETS)
def test_translate_drafter_keeps_the_greedy_text(target: str, method: str) -> None:
    for drafter in MAKERS:
        translated = drafter_of(method, drafter, target)
        for text in PROMPTS:
            prompt = prompt_of(target, text)
            expected = greedy_text(target, prompt)
            for policy in (speculative(3), distributed(2)):
                done = run(target, translated, prompt, policy)
                assert done.tokens == expected
                assert (done.tally.failed, done.tally.drafted > 0) == (0, True)


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_translate_drafter_keeps_the_sampled_text(method: str) -> None:
    sampling, prompt = Sampling(temperature=1.0, top_p=0.95, seed=4), prompt_of("byte_level", PROMPTS[1])
    unused = drafter_of(method, "characters", "byte_level")
    expected = run("byte_level", unused, prompt, autoregressive(), sampling).tokens
    for drafter in ("metaspace", "characters", "byte_level"):
        translated = drafter_of(method, drafter, "byte_level")
        for policy in (speculative(3), distributed(2)):
            assert run("byte_level", translated, prompt, policy, sampling).tokens == expected


def test_translate_drafter_auto_chooses_by_shared_tokens() -> None:
    assert isinstance(drafter_of("auto", "byte_level", "byte_level"), SamplingModel)
    assert isinstance(drafter_of("auto", "characters", "byte_level"), SLEM)
    by_token = drafter_of("tli", "characters", "byte_level")
    assert isinstance(by_token, SamplingModel)
    assert isinstance(by_token.backend, TLI)
    assert 0 < shared_token_rate(by_token.backend, vocabulary("byte_level")) < MIN_SHARED_RATE


def test_translate_drafter_without_shared_tokens() -> None:
    raw = PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(models.WordLevel({"unheard": 0, "of": 1})))
    pair = Vocabulary(Tokenizer(raw), 2), vocabulary("characters")
    backend = LlamaCpu(llama("characters"))
    with pytest.raises(ValueError, match="the drafter x shares none of its 2 tokens with the target's 52"):
        translate_drafter("tli", backend, *pair, CONTEXT, "x")
    assert len(translate_drafter("auto", backend, *pair, CONTEXT, "x").answer(ForwardRequest([5, 6], 2))) == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders on disk."""
    paths = {}
    for name in ("byte_level", "characters"):
        path = tmp_path_factory.mktemp(name)
        llama(name).save_pretrained(path)
        sample_tokenizer(name).save_pretrained(path)
        paths[name] = str(path)
    return paths


def drafting(engine: Engine) -> Any:
    return engine.fleet._servers["drafter"].model  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_engine_with_another_vocabulary_keeps_the_text(folders: dict[str, str], method: str) -> None:
    with Engine.load(folders["byte_level"], folders["characters"], vocab=method, sp=2, lookahead=2) as engine:
        assert isinstance(drafting(engine), SLEM) == (method == "slem")
        assert engine.deployment.context == CONTEXT
        assert engine.deployment.latency.drafter_ms > 0
        for text in PROMPTS[:3]:
            prompt = prompt_of("byte_level", text)
            for algorithm in ("si", "dsi"):
                done = engine.generate(prompt, max_new_tokens=LENGTH, algorithm=algorithm)
                assert done.tally.failed == 0
                assert done.tokens == greedy_text("byte_level", prompt)[: len(done.tokens)]
                assert len(done.tokens) == LENGTH or done.tokens[-1] in engine.tokenizer.eos_token_ids


def test_engine_drafters_can_have_different_vocabularies(folders: dict[str, str]) -> None:
    drafters = [folders["characters"], "ngram", folders["byte_level"]]
    with Engine.load(folders["byte_level"], drafters, lookahead=2) as engine:
        servers = engine.fleet._servers.values()  # type: ignore[attr-defined]
        assert [type(server.model).__name__ for server in servers] == [
            "SamplingModel",
            "SLEM",
            "NGram",
            "SamplingModel",
        ]
        done = engine.generate(PROMPTS[0], max_new_tokens=12)
        assert done.tokens == greedy_text("byte_level", prompt_of("byte_level", PROMPTS[0]))[:12]


def test_engine_drafter_vocabulary_smaller_than_its_tokenizer(tmp_path: Path) -> None:
    """A drafter with 40 logits and a tokenizer of 49 tokens: the others are neither read nor drafted."""
    config = llama("characters").config.to_dict() | {"vocab_size": 40}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path)
    sample_tokenizer("characters").save_pretrained(tmp_path)
    for method in ("tli", "slem"):
        with Engine.load(drafter=str(tmp_path), vocab=method, lookahead=2) as engine:
            done = engine.generate("Once upon a time 雪🙂", max_new_tokens=6)
            assert (len(done.tokens), done.tally.failed) == (6, 0)


def test_engine_with_one_vocabulary_translates_nothing(folders: dict[str, str]) -> None:
    for vocab in ("auto", "same"):
        with Engine.load(folders["byte_level"], folders["byte_level"], vocab=vocab, lookahead=2) as engine:
            assert isinstance(drafting(engine).backend, CompiledDecoder)


def test_engine_refuses_vocabularies_in_one_sentence(folders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"has another vocabulary \(49 tokens\) than the target"):
        build(EngineConfig(folders["byte_level"], (folders["characters"],), vocab="same"))
    with pytest.raises(ValueError, match="vocab 'slem': on devices the drafter must have the target's"):
        Engine.load(vocab="slem", target_devices="cpu,cpu")
    with pytest.raises(ValueError, match="has another vocabulary"):
        Engine.load(folders["byte_level"], folders["characters"], target_devices="cpu,cpu")


def test_generate_command_takes_vocab(folders: dict[str, str]) -> None:
    names = ("--target", folders["byte_level"], "--drafter", folders["characters"], "--vocab", "slem")
    done = dsi("generate", "Once", *names, "--max-new-tokens", 8)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 2  # the summary and the configuration, and no warning about forks
    expected = greedy_text("byte_level", prompt_of("byte_level", "Once"))[:8]
    assert done.stdout == sample_tokenizer("byte_level").decode(expected, skip_special_tokens=True) + "\n"
