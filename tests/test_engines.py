"""What every engine must hold as a target over HTTP: its own text, greedy and sampled, under every algorithm.

`make test` runs `dsi serve` and llama.cpp's server; `make test-engines` runs vLLM and `dsi serve` on many prompts, in
float32 and bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

import vllm_cpu
from dsi.core.messages import DRAFTER, GREEDY, TARGET, Sampling
from dsi.core.policies import policy_for
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.engine.prompts import BUILTIN_PROMPTS
from dsi.fleets.endpoint import Endpoint
from dsi.fleets.event_loop import EventLoopThread
from dsi.fleets.http import HttpFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.models.endpoints.address import parse_address
from dsi.models.hf import Transformer, load_model, read_tokenizer
from dsi.models.names import BUILTIN, model_path
from dsi.models.protocol import SamplingModel
from live_server import start
from llama_cpp import LlamaCpp

pytestmark = pytest.mark.slow

DTYPES = ("float32", "bfloat16")
NEW_TOKENS = 24
SPECS = [SpecConfig(algorithm, 3, max_lead=9) for algorithm in ("nonsi", "si", "pearl", "dsi")]
SAMPLED = Sampling(temperature=0.8, seed=3)
engines = pytest.mark.engines


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine with the built-in target, and how many prompts it is tested on."""

    url: str
    num_prompts: int

    @property
    def prompts(self) -> list[Tokens]:
        return prompts()[: self.num_prompts]


@cache
def prompts() -> list[Tokens]:
    tokenizer = read_tokenizer(model_path(BUILTIN, TARGET))
    return [tuple(tokenizer(prompt)["input_ids"]) for prompt in BUILTIN_PROMPTS]


@cache
def drafter() -> SamplingModel:
    return SamplingModel(Transformer(load_model(model_path(BUILTIN, DRAFTER))))


@pytest.fixture(
    scope="module",
    params=[
        "dsi",
        "llama.cpp",
        *(pytest.param(f"{kind} {dtype}", marks=engines) for kind in ("dsi", "vllm") for dtype in DTYPES),
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    kind, _, dtype = request.param.partition(" ")
    if kind == "llama.cpp":
        server: LlamaCpp = request.getfixturevalue("llama_cpp_target")
        yield EngineUnderTest(server.url, 3)
    elif kind == "vllm":
        if not vllm_cpu.is_installed():
            pytest.skip("vLLM is not installed: make test-engines")
        with vllm_cpu.Vllm(model_path(BUILTIN, TARGET), dtype) as vllm:
            yield EngineUnderTest(vllm.url, len(BUILTIN_PROMPTS))
    elif not dtype:
        yield EngineUnderTest(request.getfixturevalue("live").url, 6)
    else:
        live = start("--dtype", dtype)
        yield EngineUnderTest(live.url, len(BUILTIN_PROMPTS))
        live.kill()


@pytest.fixture
def endpoint(engine: EngineUnderTest) -> Iterator[Endpoint]:
    loop = EventLoopThread()
    endpoint = Endpoint(parse_address(engine.url), loop)
    loop.run(endpoint.connect())
    yield endpoint
    loop.close()


@pytest.fixture
def loop(endpoint: Endpoint) -> Iterator[EngineLoop]:
    """Two target servers on one endpoint, and a drafter in a thread."""
    targets = [Server(f"target-{i}", TARGET, endpoint) for i in (1, 2)]
    fleet = HttpFleet([*targets, Server(DRAFTER, DRAFTER, drafter())])
    yield EngineLoop(fleet)
    fleet.close()


def own_text(endpoint: Endpoint, prompt: Tokens) -> Tokens:
    """What the engine streams."""

    async def tokens() -> Tokens:
        return tuple([token async for token in endpoint.draft(prompt, NEW_TOKENS, GREEDY, len(prompt))])

    return endpoint.loop.run(tokens())


def text(loop: EngineLoop, prompt: Tokens, spec: SpecConfig, sampling: Sampling = GREEDY) -> Tokens:
    [done] = loop.run(Request(prompt, NEW_TOKENS, policy_for(spec), sampling))
    return done.tokens


def test_engine_verifies_its_own_text_however_it_is_cut(engine: EngineUnderTest, endpoint: Endpoint) -> None:
    random, wrong = Random(5), 0
    for prompt in engine.prompts:
        own, done = own_text(endpoint, prompt), 0
        while done < NEW_TOKENS:
            count = min(random.randrange(1, 8), NEW_TOKENS - done)
            tokens = (*prompt, *own[: done + count - 1])
            wrong += endpoint.loop.run(endpoint.verify(tokens, count, GREEDY, len(prompt))) != own[done : done + count]
            done += count
    assert wrong == 0


def test_engine_texts_are_its_own_under_every_algorithm(
    engine: EngineUnderTest, endpoint: Endpoint, loop: EngineLoop
) -> None:
    for i, prompt in enumerate(engine.prompts):
        assert text(loop, prompt, SPECS[i % 4]) == own_text(endpoint, prompt), (i, SPECS[i % 4])


def test_engine_samples_one_text_for_a_seed_under_every_algorithm(
    engine: EngineUnderTest, endpoint: Endpoint, loop: EngineLoop
) -> None:
    if not endpoint.wire.samples:
        pytest.skip(f"{endpoint.info.kind} is only asked greedily")
    for prompt in engine.prompts[:5]:
        texts = {text(loop, prompt, spec, SAMPLED) for spec in SPECS}
        assert len(texts) == 1
    assert text(loop, prompt, SPECS[0]) not in texts
