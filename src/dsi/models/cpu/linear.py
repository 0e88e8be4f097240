"""Linear layers in compiled kernels: float32, bfloat16, and int8 weights with a scale for each output."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsi.models.cpu.compiler import declare, kernel

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as the kernels number them
MAX_INT8 = 127


class Matrix(Structure):
    """`struct matrix` of the kernels."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("stride", c_int64),
        ("type", c_int32),
    )


declare("run_linear", None, POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int32)
declare("linear_input_type", c_int32, c_int32)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, quantized symmetrically with one scale for each output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = nn.Buffer(weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / MAX_INT8)
        rounded = (weight / self.scale[:, None]).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() * self.scale[:, None]).to(x.dtype)
        return functional.linear(x, weight, self.bias)


class CompiledLinear:
    """The product of a linear layer in compiled kernels, on the layer's own weights."""

    def __init__(self, linear: Any) -> None:
        self._weight: Tensor = linear.weight.detach()
        bias, scale = linear.bias, getattr(linear, "scale", None)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._scale = None if scale is None else scale.detach().float().contiguous()
        out_features, in_features = self._weight.shape
        self.matrix = Matrix(
            self._weight.data_ptr(),
            address(self._bias),
            address(self._scale),
            out_features,
            in_features,
            self._weight.stride(0),
            TYPES[self._weight.dtype],
        )
        self._input_dtype = input_dtype(self._weight.dtype)

    def __deepcopy__(self, _: Any) -> CompiledLinear:
        """A copied layer is found to have other weights when it computes."""
        return self

    def is_stale(self, linear: Any) -> bool:
        """Whether the layer's weights are elsewhere now."""
        return bool(self.matrix.weight != linear.weight.data_ptr())

    @staticmethod
    def supports(linear: Any) -> bool:
        """Whether this is a plain linear layer on the CPU in a number format of the kernels."""
        if type(linear) not in (nn.Linear, Int8Linear) or "forward" in vars(linear):
            return False
        weight = linear.weight
        return bool(weight.device.type == "cpu" and weight.dtype in TYPES and weight.stride(1) == 1)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).to(self._input_dtype).contiguous()
        out = torch.empty((len(rows), self.matrix.out_features), dtype=torch.float32, device="cpu")
        arguments = rows.data_ptr(), len(rows), out.data_ptr(), torch.get_num_threads()
        kernel("run_linear")(byref(self.matrix), *arguments)
        return out.to(x.dtype).view(*x.shape[:-1], self.matrix.out_features)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def input_dtype(weights: torch.dtype) -> torch.dtype:
    """The number format of inputs that are multiplied with such weights on this processor."""
    return (torch.float32, torch.bfloat16)[kernel("linear_input_type")(TYPES[weights])]


def quantize_int8(model: Any) -> Any:
    """Replace the linear layers of a model by those with int8 weights, one after the other; embeddings stay."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    return model
