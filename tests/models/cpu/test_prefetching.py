"""Prefetching: measured, and without a trace in any result."""

import pytest
import torch
from torch import nn

from dsi.models.cpu import prefetching
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.cpu.prefetching import FEW, MANY, enough, measure_prefetching, use_prefetching
from models.cpu.shapes import random_model


def test_prefetching_changes_no_bit() -> None:
    decoder, tokens = CompiledDecoder(random_model("llama")), list(range(1, 60))
    expected = decoder.forward(tokens, 1)
    for few in FEW:
        for many, into_l1 in (*MANY, (0, False)):
            use_prefetching(few, many, into_l1)
            decoder.clear_cache()
            assert torch.equal(decoder.forward(tokens, 1), expected)


def test_measure_prefetching_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(prefetching, "use_prefetching", lambda *setting: used.append(setting))
    fastest = {1: lambda: used[-1][0] == 0, 5: lambda: used[-1][1:] == (2560, True)}
    monkeypatch.setattr(prefetching, "seconds", lambda _, tokens: 1.0 if fastest[tokens]() else 2.0)
    assert measure_prefetching([nn.Linear(8, 8)]) == (0, 2560, True)
    assert used[-1] == (0, 2560, True)


def test_measure_prefetching_reads_no_more_weights_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(16, 16) for _ in range(5)]
    monkeypatch.setattr(prefetching, "MIN_BYTES", 2000)
    assert enough(layers) == layers[:2]
    assert enough(layers[:1]) == layers[:1]
