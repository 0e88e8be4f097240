"""Engines over real sockets: stand-ins with the built-in models, `dsi serve`, and llama.cpp's server."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock

import pytest

from dsi import Engine
from dsi.core.messages import DRAFTER, TARGET, Sampling
from dsi.core.request import Completion
from dsi.core.sequence import Tokens
from dsi.engine.build import cpu_model, load_for_cpu
from dsi.engine.config import EngineConfig
from dsi.engine.endpoint_tokenizer import EndpointTokenizer, load_local
from dsi.models.endpoints.address import KINDS
from dsi.models.endpoints.wire import position_seed
from dsi.models.names import BUILTIN, model_path
from dsi.models.protocol import ForwardRequest, SamplingModel
from live_server import Live
from llama_cpp import LlamaCpp
from stand_in_engine import StandInEngine

pytestmark = pytest.mark.slow

ALGORITHMS = ("nonsi", "si", "pearl", "dsi", "auto")
PROMPT, TOKENS = "Once upon a time", 24
SAMPLED = {"temperature": 0.8, "seed": 3}


@dataclass
class OneAtATime:
    """A model that several threads may call."""

    model: SamplingModel
    lock: Lock = field(default_factory=Lock)

    def answer(self, request: ForwardRequest) -> Tokens:
        with self.lock:
            return self.model.answer(request)


@cache
def model(role: str) -> OneAtATime:
    return OneAtATime(SamplingModel(cpu_model(load_for_cpu(model_path(BUILTIN, role), "float32"), 8)))


@cache
def plain_text(seeds_by_position: bool = False, **options: float) -> tuple[int, ...]:
    tokenizer = load_local(BUILTIN)
    assert tokenizer is not None
    tokens = list(tokenizer.encode(PROMPT))
    sampling, begin = Sampling(**options), len(tokens)  # type: ignore[arg-type]
    for _ in range(TOKENS):
        seed = position_seed(sampling, len(tokens)) if seeds_by_position else sampling.seed
        request = ForwardRequest(tokens, len(tokens), sampling=Sampling(sampling.temperature, seed=seed))
        tokens += model(TARGET).answer(request)
    return tuple(tokens[begin:])


def generate(engine: Engine, **options: object) -> Completion:
    return engine.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True, **options)


def stand_in(kind: str, role: str = TARGET, **fields: object) -> StandInEngine:
    name = {TARGET: BUILTIN, DRAFTER: "small"}[role]
    return StandInEngine(kind, model(role), name, load_local(BUILTIN), context=512, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_build_http_generates_the_targets_own_text(kind: str) -> None:
    with (
        stand_in(kind) as target,
        stand_in(kind) as second,
        Engine.load(target=(target.url, f"{kind}+{second.url}")) as engine,
    ):
        assert engine.deployment.sp == 2
        for algorithm in ALGORITHMS:
            assert generate(engine, algorithm=algorithm).tokens == plain_text()
        check_sampling(kind, engine)
        check_streaming(kind, engine, [target, second])
        assert not {path for path, _ in target.requests} & {"/inference/v1/generate"}


def check_sampling(kind: str, engine: Engine) -> None:
    """One text under every algorithm, where the engine can sample each position with a seed of its own."""
    if kind in ("vllm", "dsi"):
        texts = {generate(engine, algorithm=algorithm, **SAMPLED).tokens for algorithm in ALGORITHMS}
        assert texts == {plain_text(kind == "vllm", **SAMPLED)}
    else:
        with pytest.raises(ValueError, match=rf"temperature 0.8: {kind} at http.*cannot sample"):
            generate(engine, **SAMPLED)


def check_streaming(kind: str, engine: Engine, targets: list[StandInEngine]) -> None:
    """A text that is not speculated on is streamed, unless one seed would be for the whole stream."""
    for options, streams in ({}, True), (SAMPLED, kind == "dsi"):
        if options and kind in ("llama.cpp", "sglang"):
            continue
        for target in targets:
            target.requests.clear()
        generate(engine, algorithm="nonsi", **options)
        assert any("stream" in body for target in targets for _, body in target.requests) == streams


@pytest.mark.parametrize(("kind", "target_kind"), [("llama.cpp", "dsi"), ("vllm", ""), ("dsi", "vllm"), ("dsi", "dsi")])
def test_build_http_drafts_on_an_endpoint(kind: str, target_kind: str) -> None:
    with stand_in(kind, DRAFTER) as drafter, stand_in(target_kind or "dsi") as target:
        name = target.url if target_kind else BUILTIN  # a local target, too
        with Engine.load(target=name, drafter=drafter.url, algorithm="dsi", lookahead=3) as engine:
            completion = generate(engine)
            assert completion.tokens == plain_text()
            assert completion.tally.accepted > 0
            assert generate(engine, **SAMPLED).tokens == plain_text(target_kind == "vllm", **SAMPLED)


def test_build_http_runs_several_verifications_on_one_endpoint() -> None:
    with stand_in("vllm") as target, Engine.load(target=target.url, sp=3, lookahead=2) as engine:
        assert [role for _, role, _ in engine.deployment.fleet.servers()].count(TARGET) == 3
        assert generate(engine, algorithm="dsi").tokens == plain_text()


def test_build_http_asks_for_a_tokenizer_it_does_not_have() -> None:
    with StandInEngine("vllm", model(TARGET), "elsewhere", load_local(BUILTIN)) as target:
        with Engine.load(target=target.url, drafter="ngram", algorithm="nonsi") as engine:
            assert isinstance(engine.tokenizer.tokenizer, EndpointTokenizer)
            [warning] = engine.deployment.warnings
            assert "say which it is with --tokenizer" in warning
            text = generate(engine).text
        with Engine.load(target=target.url, drafter="ngram", algorithm="nonsi", tokenizer=BUILTIN) as engine:
            assert generate(engine).text == text


def test_build_http_sends_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("secret\n")
    with stand_in("vllm", api_key="secret") as target:
        config = EngineConfig(target.url, "ngram")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="status 401: wrong key"):
            Engine.load(config, algorithm="nonsi")
        with Engine.load(config, endpoint_key_file=str(tmp_path / "key"), algorithm="nonsi") as engine:
            assert generate(engine).tokens == plain_text()
        monkeypatch.setenv("DSI_ENDPOINT_API_KEY", "secret")
        with Engine.load(config, algorithm="nonsi") as engine:
            assert generate(engine).tokens == plain_text()


def test_build_http_refuses_what_cannot_work() -> None:
    with stand_in("vllm") as target, stand_in("vllm", DRAFTER) as other:
        for options, sentence in {
            (("target", "http://127.0.0.1:9"),): "http://127.0.0.1:9: cannot be reached: ",
            (("target", (target.url, other.url)),): "all targets must have the same",
            (("target", f"magic+{target.url}"),): "its kind must be vllm, sglang, llama.cpp or dsi",
            (("target", (target.url, BUILTIN)),): "2 targets: must be engines behind URLs",
            (("target", target.url), ("target_mp", 2)): "target mp: cannot be used with engines behind URLs",
            (("target", target.url), ("fleet", "ray")): "fleet: cannot be used with engines behind URLs",
            (("target", BUILTIN), ("tokenizer", BUILTIN)): "tokenizer: is for engines behind URLs",
            (("target", target.url), ("tokenizer", "no/tokenizer")): "tokenizer 'no/tokenizer': there is no",
        }.items():
            with pytest.raises(ValueError, match=sentence):
                Engine.load(**dict(options))  # type: ignore[arg-type]
        with Engine.load(target=target.url, drafter="ngram", algorithm="nonsi") as engine:
            for refused, name in (
                ({"rule": "reject", "temperature": 1.0}, "rule"),
                ({"logprobs": 1}, "logprobs"),
                (
                    {"presence_penalty": 1.0},
                    "presence_penalty",
                ),
            ):
                with pytest.raises(ValueError, match=f"^{name}"):
                    generate(engine, **refused)


def test_build_http_refuses_another_vocabulary() -> None:
    class Shifted(EndpointTokenizer):
        def __init__(self) -> None:
            self.eos_token_id, self.tokenizer = None, load_local(BUILTIN)

        def encode(self, text: str, special: bool) -> list[int]:
            assert self.tokenizer is not None
            return [token + 1 for token in self.tokenizer.encode(text, special)]

    with (
        stand_in("vllm") as target,
        StandInEngine("vllm", model(DRAFTER), "shifted", Shifted()) as drafter,  # type: ignore[arg-type]
        pytest.raises(ValueError, match="has another vocabulary than the target"),
    ):
        Engine.load(target=target.url, drafter=drafter.url)


def test_build_http_over_dsi_serve_generates_its_text(live: Live) -> None:
    with Engine.load(target=live.url, sp=2) as engine:
        for algorithm in ALGORITHMS:
            assert generate(engine, algorithm=algorithm).tokens == plain_text()
            assert generate(engine, algorithm=algorithm, **SAMPLED).tokens == plain_text(**SAMPLED)


def test_build_http_over_dsi_serve_applies_penalties(live: Live) -> None:
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    [choice] = live.post("/v1/completions", **body, **penalties).json()["choices"]
    with Engine.load(target=live.url, algorithm="dsi", lookahead=3) as engine:
        assert list(generate(engine, **penalties).tokens) == choice["token_ids"]
        assert list(generate(engine, algorithm="nonsi", **penalties).tokens) == choice["token_ids"]


def test_build_http_over_llama_cpp_generates_its_text(llama_cpp_target: LlamaCpp, llama_cpp_drafter: LlamaCpp) -> None:
    for target, drafter in ((llama_cpp_target.url, BUILTIN), (BUILTIN, llama_cpp_drafter.url)):
        with Engine.load(target=target, drafter=drafter) as engine:
            for algorithm in ALGORITHMS:
                assert generate(engine, algorithm=algorithm).tokens == plain_text()


def test_config_takes_several_addresses_as_one_target() -> None:
    config = EngineConfig(("http://a:1", "vllm+http://b:2/v1/"))  # type: ignore[arg-type]
    assert config.target == "http://a:1,vllm+http://b:2/v1/"
    assert [(address.url, address.kind) for address in config.target_endpoints] == [
        ("http://a:1", None),
        ("http://b:2", "vllm"),
    ]
