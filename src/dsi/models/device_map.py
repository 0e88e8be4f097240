"""Split one model's layers over several devices (pipeline split): activations move from one to the next.

Embeddings, final norm and LM head are on the first device, where token ids come in and logits come out, so
to its caller it is a model on that device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from dsi.models.hf import decoder_layers


def split_layers(model: Any, devices: Sequence[str]) -> Any:
    """Move each layer to its device directly: together the devices may hold what none of them could."""
    home, layers = devices[0], decoder_layers(model)
    if len(devices) == 1:
        return model.to(home)
    if len(layers) < len(devices):
        raise ValueError(
            f"{'+'.join(devices)}: are {len(devices)} devices, and the model has {len(layers)} layers to share"
        )
    sizes = [num_bytes(layer) for layer in layers]
    outside = num_bytes(model) - sum(sizes)
    for layer, device in zip(layers, assign_layers(sizes, outside, len(devices))):
        hook = partial(_inputs_to_device, devices[device])
        layer.to(devices[device]).register_forward_pre_hook(hook, with_kwargs=True)
    layers[-1].register_forward_hook(lambda *arguments: to_device(arguments[-1], home))
    inside = {id(tensor) for tensor in _tensors(layers)}
    for tensor in _tensors(model):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(home)  # in place: the embedding may be tied to the LM head
    return model


def assign_layers(sizes: Sequence[int], outside: int, count: int) -> list[int]:
    """Return each layer's device index, so that all devices hold about as many bytes.

    The first device also holds the `outside` bytes of what is not in a layer.
    """
    share = (outside + sum(sizes)) / count
    starts = accumulate(sizes, initial=outside)
    return [min(count - 1, int((start + size / 2) / share)) for start, size in zip(starts, sizes)]


def _inputs_to_device(device: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return to_device(args, device), to_device(kwargs, device)


def to_device(value: Any, device: str) -> Any:
    """Move all tensors of a nested value; a KV cache stays, each layer's part on the layer's device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    if type(value) is dict:
        return {name: to_device(item, device) for name, item in value.items()}
    return value


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in _tensors(module))
