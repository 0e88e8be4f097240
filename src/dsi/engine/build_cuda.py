"""A pair of models on devices or slices of them: one copy of the weights for each device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from dsi.core.messages import DRAFTER, TARGET
from dsi.engine.build import (
    TYPICAL_ACCEPTANCE,
    Deployment,
    check_vocabulary,
    quiet,
    tokenizer,
)
from dsi.engine.config import check_dtype
from dsi.engine.devices import Place, Placement, check
from dsi.engine.profile_cuda import in_order, latency_model
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.worker import PrefixTable, Server
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.green_contexts import green_context_streams
from dsi.models.device_map import split_layers
from dsi.models.hf import load_model
from dsi.models.names import model_path
from dsi.models.shapes import random_model
from dsi.planning.choose import DEGREES, choose
from dsi.planning.latency import monotone

ROOM = 4096  # tokens of a text at most: a cache of this length is taken from the start
PROMPT = 32  # tokens of the texts by which it is measured


def load_placed(
    target: str, drafter: str, chosen: Placement, dtype: str = "float32", sp: int | None = None
) -> Deployment:
    """`sp` None: as many targets as are fastest, by rehearsal with what is measured here."""
    check(chosen)
    quiet()
    lanes = slice_streams(chosen)
    everywhere = {place.device for place in chosen.targets}
    big = {device: load_on(model_path(target, TARGET), dtype, device) for device in sorted(everywhere)}
    small = load_on(model_path(drafter, DRAFTER), dtype, chosen.drafter.device)
    first = next(iter(big.values()))
    text = tokenizer(model_path(target, TARGET), first)
    check_vocabulary(text, tokenizer(model_path(drafter, DRAFTER), small), target, drafter)
    room = min(context_of(first), context_of(small), ROOM)
    judges = placed_targets(chosen, big, room, lanes)
    guesser = recorded(small, room, chosen.drafter, lanes, guesses=True)
    prompt = max(1, min(PROMPT, room // 4))
    shared_kv = len(judges) > len(big)
    if shared_kv and sp is None:  # or all of them are taken
        judges = in_order(judges, prompt)
    found = latency_model(judges, guesser, prompt, judges[0].cancel_points, room, shared_kv)
    degrees = DEGREES if sp is None else (sp,)
    choices = {each.algorithm: each for each in choose(found, TYPICAL_ACCEPTANCE, len(judges), degrees=degrees)}
    degree = choices["dsi"].sp
    common = shared_kv and all(judge.shares_cache_with(judges[0]) for judge in judges)
    servers = [
        Server(f"{TARGET}-{i}", TARGET, judge, PrefixTable(shared_kv=common))
        for i, judge in enumerate(judges[:degree], 1)
    ]
    fleet = CudaFleet([*servers, Server(DRAFTER, DRAFTER, guesser)])
    latency = replace(found.with_targets(degree), by_width=monotone(dict(found.by_width)))
    return Deployment(fleet, text, room, degree, latency, (DRAFTER,), choices, remarks([*judges, guesser]))


def remarks(models: Iterable[CudaGraphModel]) -> tuple[str, ...]:
    """Why forwards on a GPU run as they stand, which takes several times as long; each reason once."""
    return tuple({model.eager_reason: None for model in models if model.eager_reason and model.on_gpu})


def random_graphed(shape: str, dtype: str, device: str, room: int = 512) -> CudaGraphModel:
    """A model of a shape, by itself on a device, or made here and spread over several."""
    check_dtype(dtype)
    quiet()
    devices = device.split("+")
    made = random_model(shape, dtype, device if len(devices) == 1 else "cpu", room)
    return CudaGraphModel(split_layers(made, devices), room)


def placed_targets(
    chosen: Placement, models: dict[str, Any], room: int, lanes: dict[Place, Any]
) -> list[CudaGraphModel]:
    """Targets on one device fill one cache: none reads what another is reading."""
    first: dict[str, CudaGraphModel] = {}
    found = []
    for place in chosen.targets:
        found.append(recorded(models[place.device], room, place, lanes, first.get(place.device)))
        first.setdefault(place.device, found[-1])
    return found


def recorded(
    model: Any,
    room: int,
    place: Place,
    lanes: dict[Place, Any],
    share_cache_with: CudaGraphModel | None = None,
    guesses: bool = False,
) -> CudaGraphModel:
    try:
        return CudaGraphModel(model, room, lanes.get(place), share_cache_with=share_cache_with, drafts=guesses)
    except torch.OutOfMemoryError as error:
        raise ValueError(no_room(model.config.model_type, place.device)) from error


def load_on(name: str, dtype: str, device: str) -> Any:
    try:
        return split_layers(load_model(name, dtype), device.split("+"))
    except torch.OutOfMemoryError as error:
        raise ValueError(no_room(name, device)) from error


def no_room(what: str, device: str) -> str:
    gpus = [each for each in device.split("+") if each != "cpu"]
    free = " and ".join(f"{torch.cuda.mem_get_info(gpu)[0] / 2**30:.1f}" for gpu in gpus)
    return (
        f"{what}: does not fit on {device}, where {free} GiB are left; take bfloat16, fewer targets or a smaller model"
    )


def slice_streams(chosen: Placement) -> dict[Place, Any]:
    """A stream for each slice that is used; whole devices need none."""
    found: dict[Place, Any] = {}
    cut = [place for place in (*chosen.targets, chosen.drafter) if place.slices]
    for device, slices in sorted({(place.index, place.slices) for place in cut}):
        mine = [place for place in cut if (place.index, place.slices) == (device, slices)]
        lanes = green_context_streams(device, slices, [1] * (max(place.number for place in mine) + 1))
        found |= {place: lanes[place.number] for place in mine}
    return found


def context_of(model: Any) -> int:
    return int(getattr(model.config, "max_position_embeddings", 0) or ROOM)
