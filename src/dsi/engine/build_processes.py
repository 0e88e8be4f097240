"""Targets and drafters in processes on this machine's cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.progress import Status, no_status
from dsi.engine.build import (
    MAX_NUM_SEQS,
    LoadedDrafter,
    ModelInfo,
    check_same_vocabulary,
    cpu_model,
    drafter_names,
    load_weights,
    named_models,
    needs_translation,
    shortest_context,
    silence_transformers,
)
from dsi.engine.config import EngineConfig
from dsi.engine.deployment import Deployment
from dsi.engine.generation_config import process_logits
from dsi.engine.profile_cache import keep_profile, model_identity, profile_key, read_profile
from dsi.engine.profile_cpu import (
    LOOKUP_SHARE,
    draft_token_ms,
    expected_contention,
    forward_ms,
    measured_latency,
    profile_pair,
    target_forwards_ms,
    threads_survive_fork,
)
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.servers import Server, make_servers
from dsi.models.hf import Transformer
from dsi.models.logits_processors import with_processing
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import Model, ProcessLogits, SamplingModel
from dsi.models.tensor_parallel import TensorParallel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.translate import SAMPLE_TEXT, translate_drafter
from dsi.planning.latency import LatencyModel


def build_on_processes(config: EngineConfig, status: Status = no_status) -> Deployment:
    """Load the models here, measure them, and fork a process for each server."""
    torch.set_num_threads(1)  # before the first forward: a thread pool does not survive a fork
    sp, max_num_seqs = config.sp or 1, config.max_num_seqs or MAX_NUM_SEQS
    weights = load_weights(config.target, TARGET, config.dtype, status)
    info = ModelInfo.of(model_path(config.target, TARGET), weights)
    target = (
        cpu_model(weights, max_num_seqs)
        if config.target_mp == 1
        else TensorParallel(weights, config.target_mp, max_num_seqs, config.threads)
    )
    drafters = [load_drafter(name, info, config, status) for name in config.drafter]
    names = drafter_names(len(drafters))
    status("measuring the models")
    if not (config.threads or config.target_mp > 1 or threads_survive_fork()):
        config = replace(config, threads=1)  # or a forked process would wait for threads that are not there
    key = pair_key(config, sp)
    latency = pair_latency(key, target, drafters, config, sp)
    if len(drafters) > 1:
        latency = replace(latency, alone=None)  # SI, which takes turns, has one drafter
    process = process_logits(weights)
    models = {name: with_processing(drafter.model, process) for name, drafter in zip(names, drafters)}
    status(f"starting {sp + len(models)} servers")
    return Deployment(
        start_processes(target, models, sp, config.threads, process, latency),
        info.tokenizer,
        target.context,
        sp,
        latency,
        names,
        drafter_contexts={name: drafter.context for name, drafter in zip(names, drafters)},
        vocab_size=info.vocab_size,
        profile_key=key,
    )


def pair_key(config: EngineConfig, sp: int) -> str:
    """Identify the models and servers of a configuration in the cache of profiles."""
    identities = [model_identity(model_path(name, role)) for name, role in named_models(config)]
    return profile_key(*identities, config.drafter, config.dtype, config.vocab, sp, config.target_mp, config.threads)


def kept_latency(key: str) -> LatencyModel | None:
    """The latencies of an earlier run, unless an earlier version has kept them."""
    try:
        return LatencyModel.from_json(read_profile(key)["latency"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def pair_latency(
    key: str,
    target: Transformer | TensorParallel,
    drafters: Sequence[LoadedDrafter],
    config: EngineConfig,
    sp: int,
) -> LatencyModel:
    """The latencies of the target and the first drafter that computes, measured now or in an earlier run."""
    if kept := kept_latency(key):
        return kept
    cores = available_cores()
    draft_ms = next((drafter.draft_ms for drafter in drafters if drafter.draft_ms is not None), None)
    own = assign_cores(sp, drafter_names(len(drafters)))[f"{TARGET}-1"]
    if isinstance(target, Transformer):
        threads = config.threads or len(own)
        measured, is_free = profile_pair(target, draft_ms, threads, config.threads or len(cores))
    else:
        by_width = target_forwards_ms(target, own)
        measured, is_free = measured_latency(by_width, draft_ms() if draft_ms else by_width[1] * LOOKUP_SHARE), False
    measured = replace(measured, contention=expected_contention(sp, len(cores)))
    if is_free:
        keep_profile(key, latency=measured.json())
    return measured


def start_processes(
    target: Transformer | TensorParallel,
    drafters: Mapping[str, Model],
    sp: int,
    threads: int | None,
    process: ProcessLogits | None = None,
    latency: LatencyModel | None = None,
) -> ProcessFleet:
    """Fork the servers: with `threads` on any core, otherwise each on its own cores with a thread per core.

    Where taking turns on every core was measured to be faster, a server does when no other computes.
    """
    cores = assign_cores(sp, list(drafters))
    counts = {name: threads or max(1, len(own)) for name, own in cores.items()}
    wide = set() if latency is None or threads else wide_servers(cores, latency)

    def use_cores(server: Server, is_alone: bool) -> None:
        every = is_alone and server.name in wide
        for thread in os.listdir("/proc/self/task"):  # those of OpenMP, too
            os.sched_setaffinity(int(thread), every_core if every else cores[server.name])
        torch.set_num_threads(len(every_core) if every else counts[server.name])

    every_core = available_cores()
    return ProcessFleet(
        make_servers([SamplingModel(target, process)] * sp, drafters),
        cores={} if threads else cores,
        prepare=lambda server: torch.set_num_threads(counts[server.name]),
        use_cores=use_cores if wide else None,
    )


def wide_servers(names: Iterable[str], latency: LatencyModel) -> set[str]:
    """The servers whose forwards are faster on every core."""
    alone = latency.alone
    if alone is None:
        return set()
    return {name for name in names if name.startswith(TARGET) or alone.drafter_ms < latency.drafter_ms}


def load_drafter(name: str, target: ModelInfo, config: EngineConfig, status: Status = no_status) -> LoadedDrafter:
    if name == NGRAM:
        return LoadedDrafter(NGram())  # drafts from the target's own tokens, in any vocabulary
    weights = load_weights(name, DRAFTER, config.dtype, status)
    info, model = (
        ModelInfo.of(model_path(name, DRAFTER), weights),
        cpu_model(weights, config.max_num_seqs or MAX_NUM_SEQS),
    )
    if not needs_translation(config.vocab, target.tokenizer, info.tokenizer, (config.target, name)):
        return LoadedDrafter(SamplingModel(model), partial(forward_ms, model), model.context)
    translator = translate_drafter(config.vocab, model, info.vocabulary, target.vocabulary, model.context, name)
    return LoadedDrafter(translator, partial(draft_token_ms, translator, target.vocabulary.encode(SAMPLE_TEXT)))


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
