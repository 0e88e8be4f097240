"""Targets and drafters on a Ray cluster: each server loads its model where it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NoReturn

import torch
from transformers import AutoModelForCausalLM

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.progress import Status, no_status
from dsi.core.sequence import Tokens
from dsi.engine.build import (
    MAX_NUM_SEQS,
    LoadedDrafter,
    ModelInfo,
    cpu_model,
    drafter_names,
    end_tokens,
    load_for_cpu,
    needs_translation,
    running_limit,
    silence_transformers,
)
from dsi.engine.config import EngineConfig
from dsi.engine.deployment import Deployment
from dsi.engine.generation_config import load_generation_config
from dsi.engine.profile_fleet import FleetProfiler, sample_tokens
from dsi.fleets.ray_actors import START_SECONDS, RayFleet, ResourceRequest, resources_of
from dsi.fleets.servers import make_servers
from dsi.models.device_map import split_layers
from dsi.models.hf import check_supported, context_length, load_config, load_model, read_tokenizer
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import ForwardRequest, Model, SamplingModel
from dsi.models.tensor_parallel import TensorParallel, check_tensor_parallel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.translate import translate_drafter


@dataclass(frozen=True)
class ModelSpec:
    """What a server needs to load its model."""

    name: str
    role: str
    dtype: str = "float32"
    threads: int = 1
    max_num_seqs: int = MAX_NUM_SEQS
    gpus: int = 0
    mp: int = 1

    def load(self) -> SamplingModel:
        """Load the model in this process, over the GPUs it asked for, if any."""
        silence_transformers()
        torch.set_num_threads(1 if self.mp > 1 else self.threads)  # a thread pool would not survive the fork
        load = load_model if self.gpus else load_for_cpu
        weights = load(model_path(self.name, self.role), self.dtype)
        if self.mp > 1:
            return SamplingModel(TensorParallel(weights, self.mp, self.max_num_seqs, self.threads))
        return SamplingModel(cpu_model(split_layers(weights, own_devices(self.gpus)), self.max_num_seqs))


class RemoteModel:
    """A model that is loaded where it is unpickled: only how to load it is sent."""

    def __init__(self, make: Callable[..., Model], *arguments: Any) -> None:
        self._make, self._arguments = make, arguments

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        return self._make, self._arguments

    def answer(self, request: ForwardRequest) -> Tokens:
        self.forward(request.tokens)

    def forward(self, tokens: Sequence[int], *_: Any) -> NoReturn:
        raise RuntimeError(f"a model that lives elsewhere was asked about {len(tokens)} tokens here")


def own_devices(gpus: int) -> list[str]:
    """Ray shows a server the GPUs that it reserved, or all of them if it reserved none."""
    return [f"cuda:{i}" for i in range(min(gpus, torch.cuda.device_count()))] or ["cpu"]


def load_translator(spec: ModelSpec, target: str, vocab: str) -> Model:
    """Load a drafter with another vocabulary than the target's, whose tokenizer must be there as well."""
    model, info = spec.load(), model_info(spec.name, DRAFTER)
    vocabularies = info.vocabulary, model_info(target, TARGET).vocabulary
    return translate_drafter(vocab, model.backend, *vocabularies, info.context, spec.name)


def build_on_ray(config: EngineConfig, status: Status = no_status) -> Deployment:
    """Start an actor for each server, on a new cluster or the one at the configured address."""
    resources = scale_resources(config.requested_resources, config.target_mp)
    target = model_info(config.target, TARGET)
    check_splits(config.target, config.target_mp)
    names, sp = drafter_names(len(config.drafter)), config.sp or 1
    template = ModelSpec(config.target, TARGET, config.dtype, config.threads or 1, config.max_num_seqs or MAX_NUM_SEQS)

    def gpus_of(server: str, role: str) -> int:
        return ceil(resources_of(resources, server, role).gpus)

    targets = [
        RemoteModel(ModelSpec.load, replace(template, mp=config.target_mp, gpus=gpus_of(f"{TARGET}-{i}", TARGET)))
        for i in range(1, sp + 1)
    ]
    drafters = [
        remote_drafter(replace(template, name=name, role=DRAFTER, gpus=gpus_of(server, server)), config, target)
        for server, name in zip(names, config.drafter)
    ]
    status(f"starting {sp + len(names)} servers on Ray")
    fleet = RayFleet(
        make_servers(targets, {name: drafter.model for name, drafter in zip(names, drafters)}),
        address=config.ray_address,
        resources=resources,
        hang_seconds=config.hang_seconds,
        start_seconds=config.start_seconds or START_SECONDS,
    )
    try:
        fleet.wait_until_ready()
        status("measuring the servers")
        drafter = None if config.drafter[0] == NGRAM else names[0]
        drafts_trees = fleet.computes_trees(names[0])
        sample, contexts = sample_tokens(target), (target.context, drafters[0].context)
        profiler = FleetProfiler(fleet, sample, contexts[0], drafter, contexts[1], drafts_trees)
        latency = profiler.latency()
    except BaseException:
        fleet.close()
        raise
    return Deployment(
        fleet,
        target.tokenizer,
        target.context,
        sp,
        latency,
        names,
        trees=drafts_trees and fleet.computes_trees(TARGET),
        drafter_contexts={name: drafter.context for name, drafter in zip(names, drafters)},
        vocab_size=target.vocab_size,
        max_running=running_limit(config),
    )


def scale_resources(resources: Mapping[str, ResourceRequest], mp: int) -> dict[str, ResourceRequest]:
    """Give each process of a tensor-parallel target the CPUs of a whole one, all on one machine."""
    scaled = {TARGET: ResourceRequest(), **resources}
    for name in [name for name in scaled if mp > 1 and name.startswith(TARGET)]:
        if gpus := scaled[name].gpus:
            raise ValueError(
                f"target mp {mp}: a target is split on CPUs alone, and asks for {gpus:g} GPUs; leave one out"
            )
        scaled[name] = replace(scaled[name], cpus=mp * scaled[name].cpus)
    return scaled


def check_splits(target: str, mp: int) -> None:
    """Check by its shape, without the weights, that a target can be split."""
    if mp > 1:
        config = load_config(model_path(target, TARGET))
        with torch.device("meta"):
            check_tensor_parallel(AutoModelForCausalLM.from_config(config), mp)


def remote_drafter(spec: ModelSpec, config: EngineConfig, target: ModelInfo) -> LoadedDrafter:
    if spec.name == NGRAM:
        return LoadedDrafter(NGram())
    info = model_info(spec.name, DRAFTER)
    model = RemoteModel(ModelSpec.load, spec)
    if not needs_translation(config.vocab, target.tokenizer, info.tokenizer, (config.target, spec.name)):
        return LoadedDrafter(model, context=info.context)
    # What cannot be translated is refused here, before a server starts.
    translate_drafter(config.vocab, model, info.vocabulary, target.vocabulary, info.context, spec.name)
    return LoadedDrafter(RemoteModel(load_translator, spec, config.target, config.vocab))


def model_info(name: str, role: str) -> ModelInfo:
    """Describe a model by its configuration, without the weights."""
    path = model_path(name, role)
    try:
        config, tokenizer = load_config(path), read_tokenizer(path)
    except Exception as error:
        raise ValueError(f"{name}: there is no such model, or no tokenizer with it") from error
    check_supported(config, name)
    eos_token_ids = end_tokens(load_generation_config(path).eos_token_id)
    vocab_size = config.get_text_config().vocab_size
    return ModelInfo(Tokenizer(tokenizer, eos_token_ids), context_length(config), vocab_size)
