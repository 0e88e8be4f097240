"""Requests that share forwards in an engine with real models: each has the text that it has alone."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dsi.core.messages import Sampling
from dsi.core.policies import autoregressive
from dsi.core.request import Completion
from dsi.core.spec import SpecConfig
from dsi.engine.engine import Engine
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.spans import Span
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.names import model_path

pytestmark = pytest.mark.slow

PROMPTS = [f"{opening} {word}" for opening in ("Once upon a time, a", "One day the", "The") for word in ("cat", "king")]
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.1, top_p=0.9, top_k=40, seed=5, logprobs=2),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
)
SPECS = ("auto", "nonsi", "si", "pearl", "dsi")


def requests(engine: Engine, specs: tuple[str, ...] = SPECS) -> list[Any]:
    """Every algorithm and sampling, on texts some of which are equal, and one prompt that is read in chunks."""
    texts = [engine.tokenizer.encode(prompt) for prompt in (*PROMPTS, *PROMPTS[:3], " ".join(PROMPTS * 12))]
    return [
        engine.make_request(text, 40, replace(engine.spec, algorithm=specs[i % len(specs)]), SAMPLINGS[i % 4])
        for i, text in enumerate(texts * 2)
    ]


def essence(done: Completion) -> tuple[Any, ...]:
    rounded = [[(token, round(logprob, 6)) for token, logprob in row] for row in done.top_logprobs]
    return done.tokens, done.finish_reason, rounded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_of_requests_at_once_are_those_alone(dtype: str) -> None:
    with Engine.load(dtype=dtype) as engine:
        if not engine.deployment.shares_forwards:
            pytest.skip("forwards of several threads are no faster here")
        alone = [essence(engine.loop.run(request)[0]) for request in requests(engine)]
        assert [essence(done) for done in engine.loop.run(*requests(engine))] == alone


def plain_requests(engine: Engine, stops: Sequence[tuple[int, ...]]) -> list[Any]:
    """Texts of any length, greedy and sampled, each with its stop tokens."""
    texts, samplings = [engine.tokenizer.encode(prompt) for prompt in PROMPTS], (Sampling(), Sampling(), *SAMPLINGS)
    return [
        engine.make_request(texts[i % 6], 5 + 11 * i % 56, SpecConfig("nonsi"), samplings[i // 6], stop)
        for i, stop in enumerate(stops)
    ]


def check_plain_at_once(engine: Engine, essence: Callable[[Completion], tuple[Any, ...]]) -> None:
    """Each text is that of its request alone, whatever others do beside it: one is given up meanwhile."""
    fleet, loop = engine.deployment.fleet, engine.loop
    whole = [loop.run(request)[0].tokens for request in plain_requests(engine, [()] * 36)]
    stops = [tokens[len(tokens) // 2 :][:1] if i % 3 else () for i, tokens in enumerate(whole)]
    alone = [essence(loop.run(request)[0]) for request in plain_requests(engine, stops)]
    assert {reason for _, reason, *_ in alone} == {"length", "stop"}
    log = fleet.log = list[Span]()
    running = [loop.submit(request) for request in plain_requests(engine, stops)]
    while not running[9].tokens:  # the last of its 48 comes later
        loop.step()
    loop.cancel(running[9])
    while any(not active.done for active in running):
        loop.step()
    assert [essence(active.completion()) for active in running[:9] + running[10:]] == alone[:9] + alone[10:]
    assert running[9].completion().finish_reason == "cancelled"
    shared = [span for span in log if span.num_texts > 1]
    assert {span.kind for span in shared} == {"verify"}
    assert max(span.width for span in shared) > 1  # forwards that followed one another
    assert max(span.num_texts for span in shared) > 10


def test_plain_texts_at_once_are_those_alone() -> None:
    with Engine.load() as engine:
        if not engine.deployment.shares_forwards:
            pytest.skip("forwards of several threads are no faster here")
        check_plain_at_once(engine, essence)


TREES = tuple(SpecConfig(algorithm, 3, tree=8) for algorithm in ("si", "pearl", "dsi"))


def tree_requests(engine: Engine, prompts: Sequence[str], new: int) -> list[Any]:
    """Every algorithm, greedy and sampled, with trees."""
    texts = [engine.tokenizer.encode(prompt) for prompt in prompts]
    return [
        engine.make_request(text, new, spec, sampling)
        for sampling in (Sampling(), Sampling(temperature=0.9, seed=3))
        for spec in TREES
        for text in texts
    ]


def check_trees_at_once(engine: Engine, prompts: Sequence[str], new: int, together: int = 3) -> None:
    """Each text is that of its request alone, and of non-SI; one is cancelled meanwhile. So many share a forward."""
    fleet, loop = engine.deployment.fleet, engine.loop
    alone = [loop.run(request)[0].tokens for request in tree_requests(engine, prompts, new)]
    plain = [replace(request, policy=autoregressive()) for request in tree_requests(engine, prompts, new)]
    assert alone == [done.tokens for done in loop.run(*plain)]
    fleet.log = []
    running = [loop.submit(request) for request in tree_requests(engine, prompts, new)]
    while not running[0].tokens:
        loop.step()
    loop.cancel(running[0])
    while any(not active.done for active in running):
        loop.step()
    assert [active.completion().tokens for active in running[1:]] == alone[1:]
    assert any(span.texts and span.num_texts >= together for span in fleet.log)  # trees were verified together...
    assert any(span.level and span.num_texts >= together for span in fleet.log)  # ...and drafted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_of_requests_at_once_write_the_texts_alone(dtype: str) -> None:
    with Engine.load(dtype=dtype) as engine:
        if not engine.deployment.shares_forwards:
            pytest.skip("forwards of several threads are no faster here")
        check_trees_at_once(engine, (*PROMPTS[:2], " ".join(PROMPTS * 12)), 24)


def test_a_verification_follows_its_draft_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a request was cancelled in between; sampled trees are verified once the host has them."""
    followed, poll = list[int](), PackedCudaModel.poll_following

    def counted(*arguments: Any) -> Any:
        followed.append(len(arguments[2].tree))
        return poll(*arguments)

    monkeypatch.setattr(PackedCudaModel, "poll_following", counted)
    with Engine.load(dtype="float32", target_devices="cpu", drafter_device="cpu") as engine:
        text, spec = engine.tokenizer.encode(PROMPTS[0]), SpecConfig("si", 3, tree=8)
        for sampling in (Sampling(), Sampling(temperature=0.9, seed=3)):
            followed.clear()
            [plain] = engine.loop.run(engine.make_request(text, 24, SpecConfig("nonsi"), sampling))
            given_up = engine.loop.submit(engine.make_request(text, 24, spec, sampling))
            engine.loop.step()
            engine.loop.cancel(given_up)
            [done] = engine.loop.run(engine.make_request(text, 24, spec, sampling))
            assert done.tokens == plain.tokens
            assert done.tally.accepted > 0
            assert (8 in followed) == (not sampling.temperature)


def test_requests_at_once_on_a_device_write_the_texts_alone() -> None:
    """Here the device is a CPU, where torch computes what the kernels of a GPU do."""
    with Engine.load(dtype="float32", target_devices="cpu", drafter_device="cpu") as engine:
        assert (engine.deployment.max_running or 0) > 1  # or a server would run one text at a time
        check_trees_at_once(engine, PROMPTS[:2], 12, together=2)
        chains = [
            engine.make_request(engine.tokenizer.encode(prompt), 12, SpecConfig(algorithm), Sampling(temperature=t))
            for prompt, t in zip(PROMPTS, (0.0, 0.8, 1.1))
            for algorithm in SPECS
        ]
        alone = [engine.loop.run(replace(request, policy=autoregressive()))[0].tokens for request in chains]
        assert [done.tokens for done in engine.loop.run(*chains)] == alone


def test_engine_shares_forwards_of_requests_that_run_at_once() -> None:
    with Engine.load(spec=SpecConfig("nonsi")) as engine:
        if not engine.deployment.shares_forwards:
            pytest.skip("forwards of several threads are no faster here")
        fleet = engine.deployment.fleet
        before = fleet.server_usage()["target-1"].forwards
        fleet.log = []
        texts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        engine.loop.run(*(engine.make_request(text, 20, engine.spec, Sampling()) for text in texts))
        assert fleet.server_usage()["target-1"].forwards - before == 20 * len(PROMPTS)
        assert len({span.start for span in fleet.log}) <= 24  # forwards, for all of them


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target without compiled forwards, whose texts are not one token again and again."""
    folder: Path = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 512, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_texts_at_once_of_a_model_without_compiled_forwards_are_those_alone(gpt2_folder: str) -> None:
    with Engine.load(gpt2_folder, drafter="builtin", algorithm="nonsi") as engine:
        specs = SPECS[1:]  # without auto, whose predictions take long
        assert engine.deployment.shares_forwards
        assert engine.deployment.max_running == 256
        log = engine.deployment.fleet.log = list[Span]()
        alone = [essence(engine.loop.run(request)[0])[:2] for request in requests(engine, specs)]
        assert [essence(done)[:2] for done in engine.loop.run(*requests(engine, specs))] == alone
        assert max(span.num_texts for span in log) > 10


def test_plain_texts_at_once_of_a_model_without_compiled_forwards_are_those_alone(gpt2_folder: str) -> None:
    with Engine.load(gpt2_folder, drafter="builtin", algorithm="nonsi") as engine:
        check_plain_at_once(engine, lambda done: essence(done)[:2])


def test_trees_at_once_of_a_model_without_compiled_forwards_write_the_texts_alone(gpt2_folder: str) -> None:
    with Engine.load(gpt2_folder, drafter="builtin", algorithm="nonsi") as engine:
        check_trees_at_once(engine, PROMPTS[:2], 8, together=2)


def test_worker_that_is_forked_after_shared_forwards_computes(gpt2_folder: str) -> None:
    with Engine.load(gpt2_folder, drafter="builtin", algorithm="nonsi") as engine:
        prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]

        def texts(count: int) -> list[Any]:
            asked = [engine.make_request(prompt, 20, engine.spec, Sampling()) for prompt in prompts[:count]]
            return [done.tokens for done in engine.loop.run(*asked)]

        alone = texts(1)
        assert texts(3)[:1] == alone
        fleet = engine.deployment.fleet
        assert isinstance(fleet, ProcessFleet)
        for pid in fleet.worker_pids:
            os.kill(pid, signal.SIGKILL)
        assert texts(1) == alone


def test_texts_that_may_part_share_forwards_only_if_that_is_wanted(gpt2_folder: str) -> None:
    for exact, shares in ((None, False), (False, True)):
        with Engine.load(gpt2_folder, drafter="ngram", dtype="bfloat16", exact=exact) as engine:
            assert engine.deployment.shares_forwards == shares
