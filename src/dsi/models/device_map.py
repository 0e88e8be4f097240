"""One model over several devices: each holds a stretch of its layers, and what is read passes through them.

What is around the layers is on the first device, where texts come in and rows come out. So to whoever asks
it is a model on that device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from dsi.models.hf import decoder_layers


def split_layers(model: Any, devices: Sequence[str]) -> Any:
    """Never more on a device than its part: together they may hold what none of them could."""
    home, deep = devices[0], decoder_layers(model)
    if len(devices) == 1:
        return model.to(home)
    if len(deep) < len(devices):
        raise ValueError(
            f"{'+'.join(devices)}: are {len(devices)} devices, and the model has {len(deep)} layers to share"
        )
    sizes = [weight_of(layer) for layer in deep]
    around = weight_of(model) - sum(sizes)
    for layer, place in zip(deep, stretches(sizes, around, len(devices))):
        layer.to(devices[place]).register_forward_pre_hook(partial(bring, devices[place]), with_kwargs=True)
    deep[-1].register_forward_hook(lambda *found: moved(found[-1], home))
    inside = {id(each) for each in held(deep)}
    for each in held(model):
        if id(each) not in inside:
            each.data = each.data.to(home)  # in its place: the embedding may be the last matrix as well
    return model


def stretches(sizes: Sequence[int], around: int, count: int) -> list[int]:
    """Which of so many devices each layer is on, so that all hold about the same: the first has what is
    around the layers as well.
    """
    share = (around + sum(sizes)) / count
    ends = accumulate(sizes, initial=around)
    return [min(count - 1, int((end + size / 2) / share)) for end, size in zip(ends, sizes)]


def bring(device: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return moved(args, device), moved(kwargs, device)


def moved(what: Any, device: str) -> Any:
    """All tensors of it; a cache stays where it is, each layer's part beside the layer."""
    if isinstance(what, Tensor):
        return what.to(device)
    if isinstance(what, tuple | list):
        return type(what)(moved(each, device) for each in what)
    if type(what) is dict:
        return {name: moved(each, device) for name, each in what.items()}
    return what


def held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def weight_of(module: nn.Module) -> int:
    """In bytes."""
    return sum(each.nbytes for each in held(module))
