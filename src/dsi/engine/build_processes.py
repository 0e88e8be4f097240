"""Targets and drafters in processes on this machine's cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    needs_translation,
    shortest_context,
    silence_transformers,
)
from dsi.engine.config import EngineConfig
from dsi.engine.deployment import Deployment
from dsi.engine.generation_config import process_logits
from dsi.engine.profile_cpu import (
    LOOKUP_SHARE,
    draft_token_ms,
    expected_contention,
    forward_ms,
    measured_latency,
    target_forwards_ms,
)
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.servers import make_servers
from dsi.models.hf import Transformer
from dsi.models.logits_processors import with_processing
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import Model, ProcessLogits, SamplingModel
from dsi.models.tensor_parallel import TensorParallel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.translate import SAMPLE_TEXT, translate_drafter


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
    status("measuring the target")
    by_width = target_forwards_ms(target, assign_cores(sp, names)[f"{TARGET}-1"])
    drafter_ms = next((drafter.ms for drafter in drafters if drafter.ms is not None), by_width[1] * LOOKUP_SHARE)
    process = process_logits(weights)
    models = {name: with_processing(drafter.model, process) for name, drafter in zip(names, drafters)}
    status(f"starting {sp + len(models)} servers")
    return Deployment(
        start_processes(target, models, sp, config.threads, process),
        info.tokenizer,
        target.context,
        sp,
        measured_latency(by_width, drafter_ms, expected_contention(sp, len(available_cores()))),
        names,
        drafter_contexts={name: drafter.context for name, drafter in zip(names, drafters)},
        vocab_size=info.vocab_size,
    )


def start_processes(
    target: Transformer | TensorParallel,
    drafters: Mapping[str, Model],
    sp: int,
    threads: int | None,
    process: ProcessLogits | None = None,
) -> ProcessFleet:
    """Fork the servers: with `threads` on any core, otherwise each on its own cores with a thread per core."""
    cores = assign_cores(sp, list(drafters))
    counts = {name: threads or max(1, len(own)) for name, own in cores.items()}
    return ProcessFleet(
        make_servers([SamplingModel(target, process)] * sp, drafters),
        cores={} if threads else cores,
        prepare=lambda server: torch.set_num_threads(counts[server.name]),
    )


def load_drafter(name: str, target: ModelInfo, config: EngineConfig, status: Status = no_status) -> LoadedDrafter:
    if name == NGRAM:
        return LoadedDrafter(NGram())  # drafts from the target's own tokens, in any vocabulary
    weights = load_weights(name, DRAFTER, config.dtype, status)
    info, model = (
        ModelInfo.of(model_path(name, DRAFTER), weights),
        cpu_model(weights, config.max_num_seqs or MAX_NUM_SEQS),
    )
    if not needs_translation(config.vocab, target.tokenizer, info.tokenizer, (config.target, name)):
        return LoadedDrafter(SamplingModel(model), forward_ms(model), model.context)
    translator = translate_drafter(config.vocab, model, info.vocabulary, target.vocabulary, model.context, name)
    return LoadedDrafter(translator, draft_token_ms(translator, target.vocabulary.encode(SAMPLE_TEXT)))


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
    cores = assign_cores(1, [DRAFTER])
    infos, models = [], []
    for server, role, name in ((f"{TARGET}-1", TARGET, config.target), (DRAFTER, DRAFTER, config.drafter[0])):
        weights = load_weights(name, role, config.dtype, status)
        infos.append(ModelInfo.of(model_path(name, role), weights))
        models.append(LocalModel(cpu_model(weights), config.threads or len(cores[server])))
    check_same_vocabulary(infos[0].tokenizer, infos[1].tokenizer, (config.target, config.drafter[0]))
    context = shortest_context(model.backend.context for model in models)
    return ModelPair(models[0], models[1], infos[0].tokenizer, context)
