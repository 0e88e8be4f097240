"""A Llama's forward in eight kernels a layer, for as long as it is being recorded.

`fused.py` makes do with what torch has, for any decoder; here what lies between two matrices is one kernel
(`kernels.py`), and what a matrix adds to the text so far, it adds in its place. No mask is made, and of the
cache's room only what is filled is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from dsi.models.cuda.fused_ops import normed, swapped
from dsi.models.llama_cpu import fuse_projections, is_standard_llama, rope_type

SIZES = (32, 64, 128, 256)  # of a head
STEADY = ("default", "linear", "llama3", "yarn")  # rotations that do not depend on the length of the text

Turns = tuple[Tensor, Tensor]  # cosines and sines of all places
# By the length of texts. Recordings read them for as long as a model lives.
_turns: WeakKeyDictionary[Any, dict[int, Turns]] = WeakKeyDictionary()


def fits(model: Any) -> bool:
    """Whether a model can be recorded so."""
    if not is_standard_llama(model) or model.config.head_dim not in SIZES:
        return False
    return rope_type(model.config) in STEADY and find_spec("triton") is not None


@contextmanager
def swift(model: Any, room: int) -> Iterator[None]:
    """For texts of up to `room` tokens."""
    body, turns = model.model, _turned(model, room)
    with ExitStack() as parts:
        parts.enter_context(normed(model))
        parts.enter_context(swapped(body.rotary_emb, "forward", lambda *_, **__: turns))
        parts.enter_context(swapped(sys.modules[type(model).__module__], "create_causal_mask", _no_mask))
        for number, layer in enumerate(body.layers):
            parts.enter_context(swapped(layer, "forward", _forward(layer, number, model.config)))
        yield


def _turned(model: Any, room: int) -> Turns:
    known = _turns.setdefault(model, {})
    if room not in known:
        places = torch.arange(room, device=model.device)[None]
        known[room] = model.model.rotary_emb(model.lm_head.weight, places)
    return known[room]


def _no_mask(**_: Any) -> None:
    return None


def _forward(layer: Any, number: int, config: Any) -> Callable[..., Tensor]:
    from dsi.models.cuda.triton_kernels import attend, gated

    own = fuse_projections(layer)

    def forward(hidden_states: Tensor, *, position_embeddings: Turns, past_key_values: Any, **_: Any) -> Tensor:
        x, held = hidden_states[0], past_key_values.layers[number]
        qkv = functional.linear(layer.input_layernorm(x), own.qkv)
        seen = attend(
            qkv,
            *position_embeddings,
            held.keys,
            held.values,
            held.cumulative_length,
            config.num_attention_heads,
        )
        x.addmm_(seen, own.out.T)
        both = functional.linear(layer.post_attention_layernorm(x), own.gate_up)
        x.addmm_(gated(both), own.down.T)
        return hidden_states

    return forward
