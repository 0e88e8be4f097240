"""Logits processors of transformers on the logits of a backend, and which of them a server can run.

A processor is applied to each row of logits with the text before it, so every server gives one text; it must
depend on nothing else, since servers call it out of order and on texts that are given up.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList
from transformers.generation import PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor

from dsi.core.sequence import Tokens
from dsi.models.protocol import Model, ProcessLogits, SamplingModel

STATE_DEPTH = 2  # of attributes that are compared between two calls
MAY_HOLD_STATE = (PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)  # of transformers' own


@dataclass(frozen=True)
class LogitsProcessors:
    """Apply a list of processors to each row of logits; they see the text behind its padding."""

    processors: Sequence[Any]
    padding: Tokens = ()

    def __call__(self, logits: Tensor, tokens: Sequence[int], start: int) -> Tensor:
        process, ids = LogitsProcessorList(self.processors), torch.tensor([[*self.padding, *tokens]])
        before = len(self.padding) + start
        with torch.no_grad():
            # Cloned, because processors may write to the logits, which they cannot outside of inference mode.
            rows = [process(ids[:, : before + i], row[None].clone())[0] for i, row in enumerate(logits)]
        return torch.stack(rows)


def with_processing(model: Model, process: ProcessLogits | None) -> Model:
    """The same drafter with its logits processed like the target's, so that more draft tokens are accepted."""
    return replace(model, process=process) if isinstance(model, SamplingModel) else model


def check_stateless(processors: Sequence[Any], ids: Tensor, vocab_size: int) -> None:
    """Refuse a processor that two calls on the same text change, or that answers them differently."""
    logits = torch.linspace(-1.0, 1.0, vocab_size)[None]
    for processor in processors:
        if type(processor).__module__.startswith("transformers.") and not isinstance(processor, MAY_HOLD_STATE):
            continue
        first, state = _call(processor, ids, logits), _state(processor)
        if not torch.equal(first, _call(processor, ids, logits)) or state != _state(processor):
            name = getattr(processor, "__name__", type(processor).__name__)
            raise ValueError(
                f"the logits processor {name} keeps a state between its calls or draws random numbers, "
                "but here it must depend on the text alone"
            )


def _call(processor: Any, ids: Tensor, logits: Tensor) -> Tensor:
    with torch.no_grad():
        processed: Tensor = LogitsProcessorList([processor])(ids, logits.clone())
    return processed


def _state(value: Any, depth: int = STATE_DEPTH) -> Any:
    """What a call that counts or collects would change: plain values and sizes, not contents of tensors."""
    if isinstance(value, (bool, int, float, str, bytes, NoneType)):
        return value
    size = len(value) if isinstance(value, Sized) and not isinstance(value, Tensor) else 0
    if depth == 0 or isinstance(value, (Tensor, nn.Module)):
        return id(value), size
    return id(value), size, [(name, _state(part, depth - 1)) for name, part in _parts(value)]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, or the variables that a function shares with its surroundings."""
    if inspect.isfunction(value):
        yield from inspect.getclosurevars(value).nonlocals.items()
    yield from getattr(value, "__dict__", {}).items()
