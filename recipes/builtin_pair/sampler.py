"""Write thousands of texts at once with a small Llama: one cache for all, one step for all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU is for trying the recipe out
Choose = Callable[[Tensor, int], Tensor]  # (logits, position) -> tokens


def rotations(length: int, size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of neighbours (llama2.c) or of halves (transformers)."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


class Sampler:
    def __init__(self, weights: dict[str, Tensor], heads: int, interleaved: bool, batch: int, length: int) -> None:
        self.w, self.heads, self.interleaved = weights, heads, interleaved
        e = weights["embedding"]
        self.layers, self.size = len(weights["q"]), e.shape[1] // heads
        shape = (self.layers, 2, batch, heads, length, self.size)
        self.cache = torch.empty(shape, device=e.device, dtype=e.dtype)
        self.cos, self.sin = rotations(length, self.size, e.device, e.dtype)

    def step(self, tokens: Tensor, at: int) -> Tensor:
        """Logits after one more token of every text."""
        x = self.w["embedding"][tokens]
        for layer in range(self.layers):
            w = {name: tensor[layer] for name, tensor in self.w.items() if name not in ("embedding", "norm")}
            x = x + self.attend(norm(x, w["norm1"]), w, layer, at)
            y = norm(x, w["norm2"])
            x = x + (functional.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
        return norm(x, self.w["norm"]) @ self.w["embedding"].T

    def attend(self, x: Tensor, w: dict[str, Tensor], layer: int, at: int) -> Tensor:
        q, k, v = ((x @ w[name].T).view(len(x), self.heads, self.size) for name in ("q", "k", "v"))
        q, k = (rotate(y, self.cos[at], self.sin[at], self.interleaved) for y in (q, k))
        self.cache[layer, 0, :, :, at], self.cache[layer, 1, :, :, at] = k, v
        keys, values = self.cache[layer, 0, :, :, : at + 1], self.cache[layer, 1, :, :, : at + 1]
        found = functional.scaled_dot_product_attention(q[:, :, None], keys, values)
        return found.reshape(len(x), -1) @ w["o"].T

    @torch.inference_mode()
    def write(self, prompts: Tensor, length: int, choose: Choose) -> Tensor:
        """Continue each row of prompts (all of one length) up to `length` tokens."""
        texts = torch.empty((len(prompts), length), dtype=torch.long, device=prompts.device)
        texts[:, : prompts.shape[1]] = prompts
        for at in range(length - 1):
            logits = self.step(texts[:, at], at)
            if at + 1 >= prompts.shape[1]:
                texts[:, at + 1] = choose(logits, at + 1)
        return texts


def sampled(logits: Tensor, temperature: float, min_p: float = 0.02) -> Tensor:
    """A draw from each row, without what is far less likely than the likeliest."""
    logits = logits.float() / temperature
    logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + torch.log(torch.tensor(min_p)), -torch.inf)
    noise = torch.empty_like(logits).exponential_().log_()
    return (logits - noise).argmax(-1)
