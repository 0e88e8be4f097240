"""A pair of models on a Ray cluster: each server loads its own where it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import ceil
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dsi.core.messages import DRAFTER, TARGET, Draft, Drafted, Failed, Job, Verify
from dsi.core.sequence import Tokens, TokenSequence
from dsi.engine.build import (
    LOOKUP_SHARE,
    TEXTS,
    WIDE,
    WIDTHS,
    Deployment,
    LoadedDrafter,
    backend,
    check_vocabulary,
    drafter_names,
    endings,
    measured_latency,
    quiet,
)
from dsi.fleets.ray_actors import HANG_SECONDS, START_SECONDS, RayFleet, ResourceRequest, resources_of
from dsi.fleets.worker import Server
from dsi.models.device_map import split_layers
from dsi.models.hf import load_model
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import ForwardRequest, Model, SamplingModel
from dsi.models.tensor_parallel import TensorParallel, check_tensor_parallel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab import AUTO, SAME
from dsi.models.vocab.translate import translate_drafter
from dsi.models.vocab.vocabulary import Vocabulary
from dsi.planning.latency import LatencyModel

MEASURED = 6  # times that each kind of forward is
SAMPLE = tuple(range(1, 18))  # a text to measure by


class ModelInfo(NamedTuple):
    """What is known of a model without its weights."""

    text: Tokenizer
    context: int  # 0: without bounds
    rows: int  # tokens that it knows

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.text, self.rows)


class RemoteModel:
    """A model that is made where it is unpickled: what travels is how to make it."""

    def __init__(self, make: Callable[..., Model], *details: Any) -> None:
        self._make, self._details = make, details

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        return self._make, self._details

    def answer(self, request: ForwardRequest) -> Tokens:
        self.forward(request.tokens)

    def forward(self, tokens: Sequence[int], *_: Any) -> NoReturn:
        raise RuntimeError(f"a model that lives elsewhere was asked about {len(tokens)} tokens here")


def speaker(name: str, role: str, dtype: str, threads: int, texts: int, gpus: int = 0, mp: int = 1) -> SamplingModel:
    """What a server makes of it, over the GPUs that it has asked for, if any."""
    quiet()
    if mp > 1:
        torch.set_num_threads(1)  # a pool of threads would not survive the fork
        return SamplingModel(TensorParallel(load_model(model_path(name, role), dtype), mp, texts, threads))
    torch.set_num_threads(threads)
    return SamplingModel(backend(split_layers(load_model(model_path(name, role), dtype), devices(gpus)), texts))


def devices(gpus: int) -> list[str]:
    """Ray shows a server the GPUs that are its own, or all of them if it has asked for none."""
    return [f"cuda:{i}" for i in range(min(gpus, torch.cuda.device_count()))] or ["cpu"]


def translator(name: str, target: str, vocab: str, *means: Any) -> Model:
    """A drafter that has another vocabulary than the target, whose tokenizer must be there as well."""
    made, own = speaker(name, DRAFTER, *means), outline(name, DRAFTER)
    return translate_drafter(vocab, made.backend, own.vocabulary, outline(target, TARGET).vocabulary, own.context, name)


def load_on_ray(
    target: str,
    drafters: Sequence[str],
    sp: int,
    address: str | None,
    dtype: str = "float32",
    threads: int | None = None,
    vocab: str = AUTO,
    texts: int | None = None,
    needs: Mapping[str, ResourceRequest] | None = None,
    mp: int = 1,
    hang_seconds: float = HANG_SECONDS,
    start_seconds: float = START_SECONDS,
) -> Deployment:
    """What is asked for has been checked (`EngineConfig`). `address` None: on a cluster of its own."""
    asked = needs_in_parts(needs or {}, mp)
    quiet()
    big = outline(target, TARGET)
    check_parts(target, mp)
    names = drafter_names(len(drafters))

    def means(server: str, role: str) -> tuple[Any, ...]:
        return dtype, threads or 1, texts or TEXTS, ceil(resources_of(asked, server, role).gpus)

    guessers = [guesser(drafter, target, big, vocab, means(name, name)) for name, drafter in zip(names, drafters)]
    servers = [
        Server(name, TARGET, RemoteModel(speaker, target, TARGET, *means(name, TARGET), mp))
        for name in (f"{TARGET}-{i}" for i in range(1, sp + 1))
    ]
    servers += [Server(name, name, each.model) for name, each in zip(names, guessers)]
    crew = RayFleet(
        servers,
        address=address,
        resources=asked,
        hang_seconds=hang_seconds,
        start_seconds=start_seconds,
    )
    try:
        crew.wait_until_ready()
        pace = measured(crew, names[0], drafters[0] == NGRAM)
    except BaseException:
        crew.close()
        raise
    bounds = [big.context, *(each.context for each in guessers)]
    context = min((bound for bound in bounds if bound), default=0)
    return Deployment(crew, big.text, context, sp, pace, names)


def needs_in_parts(needs: Mapping[str, ResourceRequest], mp: int) -> dict[str, ResourceRequest]:
    """Each process of a target has the CPUs of a whole one, and all are on one machine."""
    asked = {TARGET: ResourceRequest(), **needs}
    for name in [name for name in asked if mp > 1 and name.startswith(TARGET)]:
        if gpus := asked[name].gpus:
            raise ValueError(
                f"target mp {mp}: a target is split on CPUs alone, and asks for {gpus:g} GPUs; leave one out"
            )
        asked[name] = replace(asked[name], cpus=mp * asked[name].cpus)
    return asked


def check_parts(target: str, mp: int) -> None:
    """By its shape, without its weights."""
    if mp > 1:
        config = AutoConfig.from_pretrained(model_path(target, TARGET))
        with torch.device("meta"):
            check_tensor_parallel(AutoModelForCausalLM.from_config(config), mp)


def guesser(name: str, target: str, big: ModelInfo, vocab: str, means: tuple[Any, ...]) -> LoadedDrafter:
    if name == NGRAM:
        return LoadedDrafter(NGram())
    own = outline(name, DRAFTER)
    carried = RemoteModel(speaker, name, DRAFTER, *means)
    if vocab == SAME or (vocab == AUTO and big.text.same_vocabulary(own.text)):
        check_vocabulary(big.text, own.text, target, name)
        return LoadedDrafter(carried, context=own.context)
    translate_drafter(vocab, carried, own.vocabulary, big.vocabulary, own.context, name)  # refused here if at all
    return LoadedDrafter(RemoteModel(translator, name, target, vocab, *means))


def outline(name: str, role: str) -> ModelInfo:
    path = model_path(name, role)
    try:
        config, found = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ValueError(f"{name}: there is no such model, or no tokenizer with it") from error
    ends = config.eos_token_id if hasattr(config, "eos_token_id") else None
    with suppress(OSError):  # it may have none of its own
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    context = int(getattr(config, "max_position_embeddings", 0) or 0)
    return ModelInfo(Tokenizer(found, endings(ends)), context, config.get_text_config().vocab_size)


def measured(crew: RayFleet, drafter: str, looked_up: bool) -> LatencyModel:
    """As the driver sees them, with what travels."""
    ids = count(-1000, -1)  # which no request has
    text = TokenSequence.of(SAMPLE)
    forwards = {width: min(timed(crew, Verify(next(ids), text, width)) for _ in range(MEASURED)) for width in WIDTHS}
    if looked_up:
        return measured_latency(forwards, forwards[1] * LOOKUP_SHARE)
    guess = min(timed(crew, Draft(next(ids), text, WIDE, drafter)) for _ in range(MEASURED)) / WIDE
    return measured_latency(forwards, guess)


def timed(crew: RayFleet, job: Job) -> float:
    """Milliseconds until its last word."""
    began, left = time.perf_counter(), job.count if isinstance(job, Draft) else 1
    crew.start(job)
    while left:
        event = crew.next_event()
        if isinstance(event, Failed) and event.id == job.id:
            raise ValueError(f"a server on the cluster cannot work: {event.reason}")
        left -= event.id == job.id and (not isinstance(job, Draft) or isinstance(event, Drafted))
    return 1000 * (time.perf_counter() - began)
