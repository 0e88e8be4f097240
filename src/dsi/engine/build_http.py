"""Targets and drafters that are engines behind URLs, beside local models in threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsi.core.messages import GREEDY, TARGET
from dsi.core.progress import Status, no_status
from dsi.core.sequence import Tokens
from dsi.engine.build import (
    MAX_NUM_SEQS,
    LoadedDrafter,
    ModelInfo,
    check_models,
    cpu_model,
    drafter_names,
    load_weights,
)
from dsi.engine.build_processes import available_cores, load_drafter
from dsi.engine.config import EngineConfig
from dsi.engine.deployment import Deployment
from dsi.engine.endpoint_tokenizer import EndpointTokenizer, check_endpoint_tokens, target_tokenizer
from dsi.engine.profile_fleet import FleetProfiler
from dsi.fleets.endpoint import Endpoint, EndpointError
from dsi.fleets.event_loop import EventLoopThread
from dsi.fleets.http import HttpFleet
from dsi.fleets.servers import make_servers
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.endpoints.address import is_address, parse_address
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import ForwardRequest, Model, SamplingModel, top_k_or_answer
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.translate import SAMPLE_TEXT
from dsi.planning.latency import LatencyModel

KEY_VARIABLE = "DSI_ENDPOINT_API_KEY"


@dataclass(frozen=True)
class GreedyDrafter:
    """Drafts the likeliest tokens: of those that another sampler chooses, it meets more than a sample would."""

    model: Model

    def answer(self, request: ForwardRequest) -> Tokens:
        return self.model.answer(replace(request, sampling=GREEDY))

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        return top_k_or_answer(self.model, replace(request, sampling=GREEDY), count)


def build_with_endpoints(config: EngineConfig, status: Status = no_status) -> Deployment:
    """Ask the endpoints what they are, load local models, and measure all of them through the fleet."""
    loop = EventLoopThread()
    try:
        return _build(config, loop, status)
    except BaseException:
        loop.close()
        raise


def _build(config: EngineConfig, loop: EventLoopThread, status: Status) -> Deployment:
    check_models(config)
    key = read_key(config.endpoint_key_file)
    status("asking the endpoints for their models")
    endpoints = [connected(name, loop, key) for name in config.target.split(",") if is_address(name)]
    check_one_model(endpoints)
    torch.set_num_threads(config.threads or max(1, len(available_cores()) - 1))
    target = endpoint_info(config, endpoints[0]) if endpoints else None
    if target is None:
        target, local = load_target(config, status)
        targets: list[Model] = [local]
    else:
        targets = [endpoints[i % len(endpoints)] for i in range(config.sp or len(endpoints))]
    keyed = all(endpoint.wire.keyed_by_position for endpoint in endpoints)
    drafters = [make_drafter(name, target, config, loop, key, keyed, status) for name in config.drafter]
    names = drafter_names(len(drafters))
    models = {name: drafter.model for name, drafter in zip(names, drafters)}
    fleet = HttpFleet(make_servers(targets, models), hang_seconds=config.hang_seconds)
    try:
        status("measuring the endpoints")
        latency, stream_ms = measure(fleet, target, len(targets), names, drafters, bool(endpoints))
    except BaseException:
        fleet.close()
        raise
    return Deployment(
        fleet,
        target.tokenizer,
        target.context,
        len(targets),
        latency,
        names,
        warnings=tuple(warnings(target.tokenizer)),
        drafter_contexts={name: drafter.context for name, drafter in zip(names, drafters)},
        vocab_size=target.vocab_size or None,
        endpoints=tuple(endpoints),
        stream_ms=stream_ms,
    )


def read_key(file: str | None) -> str | None:
    """The key in a file or, without one, in the environment."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    key = Path(file).read_text(encoding="utf-8").strip()
    if not key or len(key.split()) > 1 or not key.isascii():
        raise ValueError(f"endpoint key file {file}: must have one key in it")
    return key


def connected(name: str, loop: EventLoopThread, key: str | None) -> Endpoint:
    """An endpoint that has said what it is, or raise ValueError."""
    endpoint = Endpoint(parse_address(name), loop, key)
    try:
        loop.run(endpoint.connect())
    except EndpointError as error:
        raise ValueError(str(error)) from None
    return endpoint


def check_one_model(endpoints: Sequence[Endpoint]) -> None:
    """Refuse targets of different models."""
    for other in endpoints[1:]:
        first = endpoints[0]
        if Path(other.info.model).name != Path(first.info.model).name:
            raise ValueError(
                f"{other.url}: has the model {other.info.model}, and {first.url} has {first.info.model}: "
                "all targets must have the same"
            )


def endpoint_info(config: EngineConfig, endpoint: Endpoint) -> ModelInfo:
    tokenizer = target_tokenizer(config.tokenizer, endpoint)
    return ModelInfo(tokenizer, endpoint.info.context, endpoint.info.vocab_size or tokenizer.size)


def load_target(config: EngineConfig, status: Status) -> tuple[ModelInfo, Model]:
    """A local target, beside drafters behind URLs."""
    weights = load_weights(config.target, TARGET, config.dtype, status)
    info = ModelInfo.of(model_path(config.target, TARGET), weights)
    return info, SamplingModel(cpu_model(weights, config.max_num_seqs or MAX_NUM_SEQS))


def make_drafter(
    name: str,
    target: ModelInfo,
    config: EngineConfig,
    loop: EventLoopThread,
    key: str | None,
    keyed: bool,
    status: Status,
) -> LoadedDrafter:
    """A drafter of any sort; where the targets' noise is not `keyed` as ours, it drafts greedily."""
    if is_address(name):
        endpoint = connected(name, loop, key)
        endpoint.drafts_greedily = not keyed
        check_endpoint_tokens(target.tokenizer, endpoint, "the target")
        return LoadedDrafter(endpoint, endpoint.info.context)
    if name == NGRAM:
        return LoadedDrafter(NGram())
    if isinstance(target.tokenizer.tokenizer, EndpointTokenizer):
        raise ValueError(f"{name}: to compare its vocabulary, the target's tokenizer is needed here: say --tokenizer")
    drafter = load_drafter(name, target, config, status)
    model = with_threads(drafter.model, torch.get_num_threads())
    return replace(drafter, model=model if keyed else GreedyDrafter(model))


def with_threads(model: Model, threads: int) -> Model:
    """A compiled model with a number of threads of its own, whichever thread runs it."""
    if isinstance(model, SamplingModel) and isinstance(model.backend, CompiledDecoder):
        return replace(model, backend=model.backend.with_threads(threads))
    return model


def measure(
    fleet: HttpFleet,
    target: ModelInfo,
    sp: int,
    names: Sequence[str],
    drafters: Sequence[LoadedDrafter],
    has_endpoints: bool,
) -> tuple[LatencyModel, float | None]:
    """The latencies of the servers, and the time per token of a text that a target streams."""
    named = dict(zip(names, drafters))
    drafter = next((name for name, drafter in named.items() if not isinstance(drafter.model, NGram)), None)
    sample = target.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False) or (0,)
    context = named[drafter].context if drafter else 0
    profiler = FleetProfiler(fleet, sample, target.context, drafter, context)
    latency = replace(profiler.latency(), contention=profiler.contention(sp))
    return latency, profiler.stream_ms() if has_endpoints else None


def warnings(tokenizer: Tokenizer) -> list[str]:
    """What a tokenizer that is asked over HTTP lacks."""
    if not isinstance(tokenizer.tokenizer, EndpointTokenizer):
        return []
    lacks = "no chat template" if tokenizer.eos_token_ids else "neither a chat template nor an end token"
    return [f"the tokenizer is asked over HTTP, and has {lacks}: say which it is with --tokenizer"]
