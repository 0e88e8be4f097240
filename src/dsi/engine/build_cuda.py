"""Targets and drafters on CUDA devices or slices of them: one copy of the weights per device."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.progress import Status, no_status
from dsi.engine.build import PARTING, ModelInfo, check_same_vocabulary, shortest_context, silence_transformers
from dsi.engine.config import DTYPES, FLOAT32, INT8, EngineConfig, check_dtype
from dsi.engine.deployment import TYPICAL_ACCEPTANCE, Deployment
from dsi.engine.devices import Device, Placement, check_available
from dsi.engine.profile_cuda import latency_model, order_by_contention, with_packed_forwards
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.servers import PrefixTable, Server, make_servers
from dsi.models.cuda.decoder_triton import supports_triton
from dsi.models.cuda.graphs import CudaGraphModel, last_line
from dsi.models.cuda.green_contexts import green_context_streams
from dsi.models.cuda.packed import MAX_TEXTS, PackedCudaModel
from dsi.models.device_map import split_layers
from dsi.models.hf import kv_bytes, load_model
from dsi.models.names import model_path
from dsi.models.protocol import SamplingModel
from dsi.models.shapes import random_model
from dsi.planning.latency import LatencyModel, monotone
from dsi.planning.search import DEVICE_SP, search_devices

MAX_CONTEXT = 4096  # tokens: a KV cache of this length is allocated from the start
EXACT_SIZE, EXACT_SLICE_SIZE = 64, 16  # new tokens of every exact forward on a whole GPU, and on a slice of one
MIN_TEXTS = 2  # of the whole context for which there must be memory
WHOLE_TEXTS, CPU_TEXTS = 64, 8  # of the whole context for which there is room, and where it is the CPU's
TYPICAL_TEXT = 1024  # tokens of a prompt and its answer, and of the tree after them: of a chat, generously
KV_SHARE = 0.8  # of the free memory that their KV caches may take
ALIGNMENT = 16  # slots
MAX_ELEMENTS = 2**31 - 1  # of the keys of a layer, which kernels count in 32 bits
PROMPT = 32  # tokens of the prompts by which latencies are measured


def build_on_devices(config: EngineConfig, status: Status = no_status) -> Deployment:
    """Load the models, measure them, and use as many targets as are fastest in simulation, unless `sp` says."""
    placement = config.placement
    check_available(placement)
    info, targets, drafter = load_models(config, placement, status)
    context = shortest_context([targets[0].context, drafter.context])
    status("measuring the models")
    prompt = max(1, min(PROMPT, context // 4))
    shared_device = len(targets) > len({device.name for device in placement.targets})
    if shared_device and config.sp is None:  # otherwise all of them are used
        targets = order_by_contention(targets, prompt)
    latency = latency_model(targets, drafter, prompt, targets[0].cancel_points, context, shared_device)
    degrees = DEVICE_SP if config.sp is None else (config.sp,)
    fastest = search_devices(latency, TYPICAL_ACCEPTANCE, len(targets), degrees=degrees)
    plans = {plan.algorithm: plan for plan in fastest}
    sp = plans["dsi"].sp
    packed, unpacked_reason = packed_models(targets[:sp], drafter)
    if packed:
        status("measuring shared forwards and trees")
        trial = CudaFleet(make_servers(targets[:1], {DRAFTER: drafter}), packed=packed_servers(packed))
        latency = with_packed_forwards(latency, trial, packed, prompt)
    shared_kv = shared_device and all(target.shares_cache_with(targets[0]) for target in targets)
    fleet = CudaFleet(make_servers(targets[:sp], {DRAFTER: drafter}, shared_kv), packed=packed_servers(packed))
    if latency.shared_rows:
        fleet.limit_rows(latency.shared_rows)
    return Deployment(
        fleet,
        info.tokenizer,
        targets[0].context,
        sp,
        replace(latency, by_width=monotone(dict(latency.by_width))).with_targets(sp),
        plans=plans,
        warnings=(
            eager_warnings([*targets, drafter])
            + exact_warnings(config, targets, latency)
            + unpacked_warnings(unpacked_reason)
        ),
        exact=are_exact(targets),
        trees=bool(packed),
        max_tree=min((model.max_rows for model in packed.values()), default=inf) - 1,  # with the text's last token
        max_running=running_texts(packed.values()),
        drafter_contexts={DRAFTER: drafter.context},
        vocab_size=info.vocab_size,
    )


def load_models(
    config: EngineConfig, placement: Placement, status: Status = no_status
) -> tuple[ModelInfo, list[CudaGraphModel], CudaGraphModel]:
    """Return the target's description, a model for each target device, and the drafter."""
    names = config.target, config.drafter[0]
    paths = model_path(names[0], TARGET), model_path(names[1], DRAFTER)
    devices = sorted({device.name for device in placement.targets})
    slices = slice_streams(placement)
    status(f"loading target {names[0]}, {config.dtype}")
    weights = {device: load_on(paths[0], config.dtype, device) for device in devices}
    status(f"loading drafter {names[1]}, {config.dtype}")
    drafter_weights = load_on(paths[1], config.dtype, placement.drafter.name)
    target, drafter = ModelInfo.of(paths[0], weights[devices[0]]), ModelInfo.of(paths[1], drafter_weights)
    check_same_vocabulary(target.tokenizer, drafter.tokenizer, names)
    context = shortest_context([target.context, MAX_CONTEXT])
    targets = target_models(placement, weights, context, slices, bool(config.exact))
    draft_context = shortest_context([drafter.context, context])  # no text is longer than the target's context
    draft_model = cuda_model(drafter_weights, draft_context, placement.drafter, slices, drafts=True)
    return target, targets, draft_model


def packed_models(targets: Sequence[CudaGraphModel], drafter: CudaGraphModel) -> tuple[dict[str, PackedCudaModel], str]:
    """Models, by role, for forwards that several texts share and for draft trees: of one target on a whole device.

    They have the weights of the other two, and KV caches of their own. Where they cannot be made there are none, and
    a reason.
    """
    models = {TARGET: targets[0], DRAFTER: drafter}
    if len(targets) > 1 or not all(map(has_packed_forwards, models.values())):
        return {}, ""
    num_slots = slots_by_role(models)
    for role, model in models.items():
        if num_slots[role] < (least := MIN_TEXTS * model.context):
            return {}, f"there is memory for {num_slots[role]} tokens of the {role}'s KV cache, and {least} are needed"
    try:
        return {
            role: PackedCudaModel(model.model, model.context, num_slots[role], drafts=role == DRAFTER)
            for role, model in models.items()
        }, ""
    except Exception as error:  # too little memory or shared memory, or another Triton: there are other forwards
        reason = last_line(error)
    gc.collect()
    if targets[0].on_gpu:
        torch.cuda.empty_cache()
    return {}, reason


def unpacked_warnings(reason: str) -> tuple[str, ...]:
    return (f"texts do not share forwards, and there are no draft trees ({reason})",) if reason else ()


def running_texts(models: Iterable[PackedCudaModel]) -> int:
    """How many requests may run at once: so many that the KV caches hold all their texts if these are typical.

    Longer ones may run, too, but then what does not fit is computed again.
    """
    fitting = (model.pool.num_slots // min(model.context, TYPICAL_TEXT) for model in models)
    return max(1, min(MAX_TEXTS, min(fitting, default=1)))


def packed_servers(models: Mapping[str, PackedCudaModel]) -> dict[str, Server]:
    """By the names of the servers that have the same weights."""
    return {
        f"{TARGET}-1" if role == TARGET else role: Server(role, role, SamplingModel(model), PrefixTable(MAX_TEXTS))
        for role, model in models.items()
    }


def has_packed_forwards(model: CudaGraphModel) -> bool:
    """Whether the forward of several texts gives each the bits, in float32 the text, that it has alone."""
    same_bits = model.exact and model.exact_size is None
    captured = not (model.on_gpu and (model.eager_reason or model.slower_reason))
    float32 = model.model.dtype == torch.float32
    return supports_triton(model.model) and captured and (float32 or same_bits) and not model.is_slice


def slots_by_role(models: Mapping[str, CudaGraphModel]) -> dict[str, int]:
    """How many tokens of all texts each KV cache has room for: where they share a GPU, both for as many.

    A text has to fit into both. What a drafter does not take because it has its most is the target's.
    """
    target, drafter = models[TARGET], models[DRAFTER]
    of_target, of_drafter = kv_bytes(target.model), kv_bytes(drafter.model)
    shared = target.on_gpu and target.model.device == drafter.model.device
    drafted = slots_within(drafter, kv_room(drafter), of_drafter + shared * of_target)
    return {
        TARGET: slots_within(target, kv_room(target) - shared * drafted * of_drafter, of_target),
        DRAFTER: drafted,
    }


def kv_room(model: CudaGraphModel) -> int:
    """The bytes of a device that KV caches may take."""
    if not model.on_gpu:
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(model.model.device)
    return int(KV_SHARE * free)


def slots_within(model: CudaGraphModel, room: int, of_token: int) -> int:
    """How many tokens there are so many bytes for, at most those of all texts if they are typical, or of some whole."""
    num_layers, itemsize = model.model.config.num_hidden_layers, model.model.dtype.itemsize
    of_slot = kv_bytes(model.model) // (2 * itemsize * num_layers)
    texts = CPU_TEXTS * model.context
    if model.on_gpu:
        texts = max(WHOLE_TEXTS * model.context, MAX_TEXTS * min(model.context, TYPICAL_TEXT))
    most: int = min(texts, MAX_ELEMENTS // of_slot, room // of_token)
    return most // ALIGNMENT * ALIGNMENT


def eager_warnings(models: Iterable[CudaGraphModel]) -> tuple[str, ...]:
    """Why forwards on a GPU run without CUDA graphs or our kernels, and slower; each reason once."""
    reasons = [model.eager_reason or model.slower_reason for model in models if model.on_gpu]
    return tuple(dict.fromkeys(filter(None, reasons)))


def are_exact(targets: Sequence[CudaGraphModel]) -> bool:
    """Whether all targets compute the same bits: GPUs and kernels of different kinds may round differently."""
    return all(target.exact for target in targets) and len({kind(target) for target in targets}) == 1


def kind(target: CudaGraphModel) -> str:
    return f"{target.device_name}, forwards of {target.exact_size or 'any'} tokens"


def exact_warnings(config: EngineConfig, targets: Sequence[CudaGraphModel], latency: LatencyModel) -> tuple[str, ...]:
    """That texts may part, and what it would cost if they must not, unless the user has chosen."""
    if are_exact(targets):
        return ()
    kinds = "; ".join(sorted({kind(target) for target in targets}))
    if config.exact:  # each target is, but not all of them together
        raise ValueError(f"exact: targets of different kinds may round differently ({kinds}); leave it out ({PARTING})")
    if config.exact is not None or config.dtype == FLOAT32:
        return ()
    if all(target.exact for target in targets):
        return (f"in {config.dtype} {PARTING}: targets of different kinds may round differently ({kinds})",)
    size = exact_size(config.placement.targets[0])
    by_width = {width: float(ms) for width, ms in latency.by_width}
    cost = by_width.get(min(size, targets[0].context), by_width[max(by_width)]) / by_width[min(by_width)] - 1
    return (f"in {config.dtype} {PARTING}; with --exact they do not, and a forward takes {max(0.0, cost):.0%} longer",)


def exact_size(device: Device) -> int:
    return EXACT_SLICE_SIZE if device.slices else EXACT_SIZE


def random_cuda_model(shape: str, dtype: str, device: str, context: int = 512) -> CudaGraphModel:
    """A model of this shape with random weights, on one device or spread over several."""
    check_dtype(dtype)
    if dtype == INT8:
        raise ValueError(f"dtype {dtype!r}: is for CPUs; on {device} say one of {', '.join(DTYPES[:-1])}")
    silence_transformers()
    names = device.split("+")
    weights = random_model(shape, dtype, device if len(names) == 1 else "cpu", context)
    return CudaGraphModel(split_layers(weights, names), context)


def target_models(
    placement: Placement, weights: dict[str, Any], context: int, slices: dict[Device, Any], exact: bool
) -> list[CudaGraphModel]:
    """Targets on one device share their KV cache: none computes what another is computing."""
    size = max(map(exact_size, placement.targets)) if exact else None  # one for all: it decides how sums are taken
    first: dict[str, CudaGraphModel] = {}
    models = []
    for device in placement.targets:
        models.append(cuda_model(weights[device.name], context, device, slices, first.get(device.name), size=size))
        first.setdefault(device.name, models[-1])
    return models


def cuda_model(
    weights: Any,
    context: int,
    device: Device,
    slices: dict[Device, Any],
    share_cache_with: CudaGraphModel | None = None,
    drafts: bool = False,
    size: int | None = None,
) -> CudaGraphModel:
    options = {"share_cache_with": share_cache_with, "drafts": drafts, "exact_size": size}
    try:
        return CudaGraphModel(weights, context, slices.get(device), **options)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise ValueError(out_of_memory(weights.config.model_type, device.name)) from error


def load_on(path: str, dtype: str, device: str) -> Any:
    try:
        return split_layers(load_model(path, dtype), device.split("+"))
    except torch.OutOfMemoryError as error:
        raise ValueError(out_of_memory(path, device)) from error


def out_of_memory(name: str, device: str) -> str:
    gpus = [part for part in device.split("+") if part != "cpu"]
    free = " and ".join(f"{torch.cuda.mem_get_info(gpu)[0] / 2**30:.1f}" for gpu in gpus)
    advice = "take bfloat16, fewer targets or a smaller model"
    return f"{name}: does not fit on {device}, where {free} GiB are left; {advice}"


def slice_streams(placement: Placement) -> dict[Device, Any]:
    """A stream for each slice in use; whole devices need none."""
    by_device: dict[Device, Any] = {}
    cut = [device for device in (*placement.targets, placement.drafter) if device.slices]
    for index, slices in sorted({(device.index, device.slices) for device in cut}):
        own = [device for device in cut if (device.index, device.slices) == (index, slices)]
        slice_of = green_context_streams(index, slices, [1] * (max(device.slice for device in own) + 1))
        by_device |= {device: slice_of[device.slice] for device in own}
    return by_device
