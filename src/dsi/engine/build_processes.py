"""Targets and drafters in processes on this machine's cores."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.progress import Status, no_status
from dsi.core.sequence import Tokens
from dsi.engine.build import (
    MAX_NUM_SEQS,
    LoadedDrafter,
    ModelInfo,
    check_exact,
    check_same_vocabulary,
    cpu_model,
    cpu_warnings,
    drafter_names,
    load_weights,
    named_models,
    needs_translation,
    running_limit,
    shortest_context,
    silence_transformers,
)
from dsi.engine.config import FLOAT32, EngineConfig
from dsi.engine.deployment import Deployment
from dsi.engine.generation_config import process_logits
from dsi.engine.profile_cache import EXPIRES_SECONDS, keep_profile, model_identity, profile_key, read_profile
from dsi.engine.profile_cpu import expected_contention, may_use_every_core, threads_survive_fork
from dsi.engine.profile_fleet import FleetProfiler, sample_tokens
from dsi.engine.profile_trees import ON_CPU, with_trees
from dsi.fleets.packed import MAX_TOKENS
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.servers import Server, make_servers
from dsi.models.cpu.compiler import library_path, why_unavailable
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.hf import Transformer
from dsi.models.logits_processors import with_processing
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import Model, ProcessLogits, SamplingModel, computes_trees
from dsi.models.tensor_parallel import TensorParallel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.translate import translate_drafter
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import forward_ms, num_steps

# Of the time of a measurement that all threads together may have waited for a core, or it is repeated: 0.1 on two idle
# cores, 0.5 and more beside a busy process. What is disturbed nevertheless is not kept for long.
MAX_WITHOUT_CORE, MAX_MEASUREMENTS, DISTURBED_SECONDS = 0.25, 3, 600
MAX_INLINE_MS = 20  # of a forward in the engine's own process, which waits for it; messages would cost more
MAX_SHARED_MS, MIN_TOKENS = 150, 16  # of a forward that requests share, and new tokens that it computes however slow
MAX_PACKED_SEQS = 256  # texts of requests that share forwards, whose KV caches are kept...
MAX_KV_SHARE, TYPICAL_LENGTH = 0.25, 512  # ...while they take this share of the memory, at so many tokens each
MIN_SHARE = 0.95  # of the time with few threads that forwards must take on every core to be run on them
TYPICAL_DRAFT = 3  # draft tokens
TREE_PROMPT = 16  # tokens of the text with which trees are measured


def build_on_processes(config: EngineConfig, status: Status = no_status) -> Deployment:
    """Load the models here, measure them, and fork a process for each server."""
    torch.set_num_threads(1)  # no pool of threads before there is a forward that needs one
    sp, max_num_seqs = config.sp or 1, config.max_num_seqs or MAX_NUM_SEQS
    weights = load_weights(config.target, TARGET, config.dtype, status)
    info = ModelInfo.of(model_path(config.target, TARGET), weights)
    target = (
        cpu_model(weights, max_num_seqs)
        if config.target_mp == 1
        else TensorParallel(weights, config.target_mp, max_num_seqs, config.threads)
    )
    warnings = cpu_warnings() + check_exact(target, config)
    drafters = [load_drafter(name, info, config, status) for name in config.drafter]
    names = drafter_names(len(drafters))
    process = process_logits(weights)
    models = {name: with_processing(drafter.model, process) for name, drafter in zip(names, drafters)}
    status(f"starting {sp + len(models)} servers")
    if not (config.threads or config.target_mp > 1 or threads_survive_fork()):
        config = replace(config, threads=1)  # or a forked process would wait for threads that are not there
    key = pair_key(config, sp)
    kept = kept_profile(key)
    every_core = bool(kept.every_core) if kept else uses_every_core(target, config, sp)
    shares = may_share_forwards(target, config, every_core)
    fleet = start_processes(target, models, sp, config.threads, process, every_core, shares, config.hang_seconds)
    try:
        status("measuring the models")
        if kept is None:
            kept = measure_pair(key, fleet, info, target.context, drafters)
        limit_inline(fleet, kept.latency)
        fleet.every_core = kept.every_core
        limit_threads(fleet, len(assign_cores(sp, names)[f"{TARGET}-1"]))
        for role in (TARGET, *names):  # a drafter's forward takes no longer than a target's
            fleet.expect_forward(role, float(kept.latency.target_ms) / 1000)
    except BaseException as error:
        fleet.close()
        if config.target_mp > 1 and isinstance(error, ValueError):
            raise ValueError(f"target mp {config.target_mp}: the processes do not work together ({error})") from error
        raise
    return Deployment(
        fleet,
        info.tokenizer,
        target.context,
        sp,
        kept.latency,
        names,
        warnings=warnings,
        exact=isinstance(target, CompiledDecoder),
        trees=getattr(target, "supports_trees", False) and computes_trees(drafters[0].model),
        drafter_contexts={name: drafter.context for name, drafter in zip(names, drafters)},
        vocab_size=info.vocab_size,
        repetition_penalty=getattr(weights.generation_config, "repetition_penalty", None) or 1.0,
        profile_key=key,
        max_running=(
            packed_sequences(target) if fleet.packs and isinstance(target, Transformer) else running_limit(config)
        ),
    )


def uses_every_core(target: Transformer | TensorParallel, config: EngineConfig, sp: int) -> bool:
    """Whether forwards that take turns may use every core; each server has its own cores otherwise."""
    if config.threads or isinstance(target, TensorParallel):
        return False
    own = assign_cores(sp, drafter_names(len(config.drafter)))[f"{TARGET}-1"]
    return may_use_every_core(target, len(own), len(available_cores()))


def may_share_forwards(target: Transformer | TensorParallel, config: EngineConfig, every_core: bool) -> bool:
    """Whether requests share forwards, in this process on every core.

    Logits that are not exact depend in their last bits on who shares a forward, as they do on its width: in float32
    that is far less than what two scores differ by; in other formats the user must not mind.
    """
    if isinstance(target, CompiledDecoder):
        return every_core
    if config.threads or isinstance(target, TensorParallel):
        return False
    return target.supports_trees and (config.dtype == FLOAT32 or config.exact is False)


def pair_key(config: EngineConfig, sp: int) -> str:
    """Identify the models and servers of a configuration in the cache of profiles."""
    identities = [model_identity(model_path(name, role)) for name, role in named_models(config)]
    options = config.drafter, config.dtype, config.vocab, sp, config.target_mp, config.threads
    return profile_key(*identities, *options, why_unavailable() or library_path().name)


@dataclass(frozen=True)
class MeasuredPair:
    """What was measured of a pair of models on this machine."""

    latency: LatencyModel
    every_core: frozenset[str]  # servers whose forwards are faster on every core


def kept_profile(key: str) -> MeasuredPair | None:
    """What an earlier run has measured, unless an earlier version has kept it."""
    try:
        kept = read_profile(key)
        return MeasuredPair(LatencyModel.from_json(kept["latency"]), frozenset(kept["every_core"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def measure_pair(
    key: str, fleet: ProcessFleet, target: ModelInfo, context: int, drafters: Sequence[LoadedDrafter]
) -> MeasuredPair:
    """Measure until the cores were free meanwhile, a few times at most, and keep the least disturbed result."""
    attempts: list[tuple[float, MeasuredPair]] = []
    every_core, disturbed = fleet.every_core, True
    while disturbed and len(attempts) < MAX_MEASUREMENTS:
        fleet.every_core = every_core
        began, without_core = time.perf_counter(), fleet.seconds_without_core()
        measured = measure_once(fleet, target, context, drafters)
        waits = [seconds - without_core.get(name, 0) for name, seconds in fleet.seconds_without_core().items()]
        share = sum(waits) / (time.perf_counter() - began)
        attempts.append((share, measured))
        disturbed = share >= MAX_WITHOUT_CORE
    _, measured = min(attempts, key=itemgetter(0))
    seconds = DISTURBED_SECONDS if disturbed else EXPIRES_SECONDS
    keep_profile(key, seconds, latency=measured.latency.json(), every_core=sorted(measured.every_core))
    return measured


def measure_once(
    fleet: ProcessFleet, target: ModelInfo, context: int, drafters: Sequence[LoadedDrafter]
) -> MeasuredPair:
    """Measure the target and the first drafter that computes."""
    named = dict(zip(drafter_names(len(drafters)), drafters))
    name = next((name for name, drafter in named.items() if not isinstance(drafter.model, NGram)), None)
    drafter_context = named[name].context if name else 0
    trees = name is not None and computes_trees(named[name].model)
    sample = sample_tokens(target)
    profiler = FleetProfiler(fleet, sample, context, name, drafter_context, trees)
    sp, own = len(fleet.servers()) - len(drafters), profiler.latency()
    own = replace(own, contention=expected_contention(sp, len(available_cores())))
    # SI has one drafter.
    measured = measure_turns(profiler, fleet, own) if len(drafters) == 1 else MeasuredPair(own, frozenset())
    if trees:
        measured = measure_trees(measured, fleet, sample, shortest_context([context, drafter_context]))
    return measured


def measure_turns(profiler: FleetProfiler, fleet: ProcessFleet, own: LatencyModel) -> MeasuredPair:
    """Measure forwards that take turns where they may use every core; slow ones do not run in the engine's process."""
    limit_inline(fleet, own)
    if not fleet.every_core:
        return MeasuredPair(own, frozenset())
    engine_ms = profiler.engine_ms()
    wide = profiler.latency(every_core=True).with_engine_ms(engine_ms)
    return on_every_core(wide, own.with_engine_ms(engine_ms), fleet.every_core)


def measure_trees(measured: MeasuredPair, fleet: ProcessFleet, sample: Tokens, context: int) -> MeasuredPair:
    """Measure turns with draft trees: with forwards this fast, the engine's work for each node counts."""
    if measured.latency.alone is None or not fleet.runs_inline:
        return measured
    fleet.every_core, context = measured.every_core, context or sys.maxsize
    alone = with_trees(measured.latency.alone, fleet, sample[:TREE_PROMPT], context, ON_CPU, chain=True)
    return replace(measured, latency=replace(measured.latency, alone=alone))


def limit_inline(fleet: ProcessFleet, latency: LatencyModel) -> None:
    """Keep slow forwards out of the engine's process, but for those that requests share, which stay short."""
    max_tokens = MAX_TOKENS
    while max_tokens > MIN_TOKENS and forward_ms(latency.alone or latency, max_tokens) > MAX_SHARED_MS:
        max_tokens //= 2
    steps = partial(num_steps, latency.alone or latency)
    fleet.limit_inline(latency.target_ms - latency.engine_ms <= MAX_INLINE_MS, max_tokens, steps)


def limit_threads(fleet: ProcessFleet, threads: int) -> None:
    """Let torch use so many threads in this process, unless forwards on every core were measured to be faster.

    Where others compute as well, threads that wait for one another wait for them.
    """
    for server in fleet.inline_servers:  # compiled forwards have threads of their own
        if server.role == TARGET and f"{TARGET}-1" in fleet.every_core:
            continue
        if isinstance(model := server.model, SamplingModel) and isinstance(model.backend, Transformer):
            model.backend.torch_threads = min(threads, model.backend.torch_threads)


def draft_turn_ms(latency: LatencyModel) -> float:
    """What a typical draft takes, to the drafter and back."""
    return float(TYPICAL_DRAFT * latency.drafter_ms + 2 * latency.drafter_delay_ms)


def on_every_core(wide: LatencyModel, own: LatencyModel, servers: frozenset[str]) -> MeasuredPair:
    """Forwards that take turns use every core if that is faster than their own, the drafter's unless it loses."""
    if wide.target_ms >= MIN_SHARE * own.target_ms:
        return MeasuredPair(own, frozenset())
    if MIN_SHARE * draft_turn_ms(wide) >= draft_turn_ms(own):
        servers = frozenset(name for name in servers if name.startswith(TARGET))
        wide = replace(wide, drafter_ms=own.drafter_ms, drafter_delay_ms=own.drafter_delay_ms)
    return MeasuredPair(replace(own, alone=wide), servers)


def start_processes(
    target: Transformer | TensorParallel,
    drafters: Mapping[str, Model],
    sp: int,
    threads: int | None,
    process: ProcessLogits | None = None,
    every_core: bool = False,
    shares_forwards: bool = False,
    hang_seconds: float | None = None,
) -> ProcessFleet:
    """Fork the servers: with `threads` on any core, otherwise each on its own cores with a thread per core.

    With `every_core`, a forward beside which nothing computes runs on all of them; with `shares_forwards`, in this
    process, where requests share it.
    """
    cores = assign_cores(sp, list(drafters))
    counts = {name: threads or max(1, len(own)) for name, own in cores.items()}

    def use_cores(server: Server, is_alone: bool) -> None:
        for thread in os.listdir("/proc/self/task"):  # those of OpenMP, too
            os.sched_setaffinity(int(thread), available if is_alone else cores[server.name])
        torch.set_num_threads(len(available) if is_alone else counts[server.name])

    available = available_cores()
    inline: dict[str, Server] = {}
    if shares_forwards:
        here = for_many_requests(SamplingModel(target, process), len(available))
        others = {name: for_many_requests(model, len(available)) for name, model in drafters.items()}
        servers = make_servers([here], others, capacity=MAX_PACKED_SEQS)
        inline = {server.role: server for server in servers}
    return ProcessFleet(
        make_servers([SamplingModel(target, process)] * sp, drafters),
        inline=inline,
        cores={} if threads else cores,
        prepare=lambda server: torch.set_num_threads(counts[server.name]),
        use_cores=use_cores if every_core else None,
        hang_seconds=hang_seconds,
    )


def for_many_requests(model: Model, threads: int) -> Model:
    """A model with threads and KV caches of its own, for as many texts as the memory allows."""
    if not isinstance(model, SamplingModel) or not isinstance(backend := model.backend, Transformer):
        return model
    return replace(model, backend=backend.with_threads(threads, packed_sequences(backend)))


def packed_sequences(model: Transformer) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sequences = int(MAX_KV_SHARE * memory / (TYPICAL_LENGTH * model.kv_bytes))
    return max(MAX_NUM_SEQS, min(MAX_PACKED_SEQS, sequences))


def load_drafter(name: str, target: ModelInfo, config: EngineConfig, status: Status = no_status) -> LoadedDrafter:
    if name == NGRAM:
        return LoadedDrafter(NGram())  # drafts from the target's own tokens, in any vocabulary
    weights = load_weights(name, DRAFTER, config.dtype, status)
    info, model = (
        ModelInfo.of(model_path(name, DRAFTER), weights),
        cpu_model(weights, config.max_num_seqs or MAX_NUM_SEQS),
    )
    if not needs_translation(config.vocab, target.tokenizer, info.tokenizer, (config.target, name)):
        return LoadedDrafter(SamplingModel(model), model.context)
    translator = translate_drafter(config.vocab, model, info.vocabulary, target.vocabulary, model.context, name)
    return LoadedDrafter(translator)


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def assign_cores(sp: int, drafters: Sequence[str], cores: Sequence[int] = ()) -> dict[str, list[int]]:
    """Give the last of the cores, by default all of this process, to the drafters, the others to targets in turn."""
    cores = cores or available_cores()
    targets = [f"{TARGET}-{i}" for i in range(1, sp + 1)]
    if len(cores) == 1:
        return {name: list(cores) for name in (*targets, *drafters)}
    rest = cores[:-1]
    assigned = {name: list(rest[i :: len(targets)]) or [rest[i % len(rest)]] for i, name in enumerate(targets)}
    return assigned | {name: [cores[-1]] for name in drafters}


@dataclass(frozen=True)
class LocalModel:
    """A model in this process, with the threads that its server would have."""

    backend: Transformer
    threads: int

    def fresh(self) -> SamplingModel:
        """Return the model with an empty KV cache, so that no text speeds up the next."""
        torch.set_num_threads(self.threads)
        self.backend.clear_cache()
        return SamplingModel(self.backend)


@dataclass(frozen=True)
class ModelPair:
    """A target and a drafter in this process, without a fleet."""

    target: LocalModel
    drafter: LocalModel
    tokenizer: Tokenizer
    context: int  # of the shorter one; 0: unlimited


def load_model_pair(config: EngineConfig, status: Status = no_status) -> ModelPair:
    """Load the target and the first drafter of an engine with one target, to measure each by itself."""
    config.check_measurable()
    silence_transformers()
    torch.set_num_threads(1)  # while it loads: a thread pool does not survive a fork
    cores = assign_cores(1, [DRAFTER])
    infos, models = [], []
    for server, role, name in ((f"{TARGET}-1", TARGET, config.target), (DRAFTER, DRAFTER, config.drafter[0])):
        weights = load_weights(name, role, config.dtype, status)
        infos.append(ModelInfo.of(model_path(name, role), weights))
        models.append(LocalModel(cpu_model(weights), config.threads or len(cores[server])))
    check_same_vocabulary(infos[0].tokenizer, infos[1].tokenizer, (config.target, config.drafter[0]))
    context = shortest_context(model.backend.context for model in models)
    return ModelPair(models[0], models[1], infos[0].tokenizer, context)
