"""Which slices of a GPU are used first where they share its memory bandwidth."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dsi.engine import profile_cuda
from dsi.engine.profile_cuda import PACKED_ROWS, order_by_contention, with_packed_drafts
from dsi.planning.latency import LatencyModel


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd and even slices share a memory path each, which serves two without contention."""

    def concurrent_forward_ms(models: Sequence[Any], *_: Any) -> float:
        busiest: int = max(sum(model % 2 == half for model in models) for half in (0, 1))
        return 10.0 + len(models) + 5.0 * max(0, busiest - 2)

    monkeypatch.setattr(profile_cuda, "concurrent_forward_ms", concurrent_forward_ms)


@pytest.mark.usefixtures("halves")
def test_order_by_contention_puts_independent_slices_first() -> None:
    models: list[Any] = [1, 3, 5, 7, 2, 4, 6]
    ordered = order_by_contention(models)
    assert sorted(ordered) == sorted(models)
    assert ordered[0] == 1  # alone, all are equal
    assert sum(model % 2 for model in ordered[:4]) == 2


@pytest.mark.usefixtures("halves")
def test_order_by_contention_keeps_one_or_two() -> None:
    assert order_by_contention([]) == []
    assert order_by_contention([3, 1]) == [3, 1]  # type: ignore[list-item]


class PackedModel:
    """Takes 3 ms and a quarter for each further row, by a clock of its own."""

    class Pool:
        max_texts = 64

        def clear(self) -> None:
            pass

    pool = Pool()

    def __init__(self) -> None:
        self.now = 0.0

    def forward_packed(self, requests: Sequence[Any]) -> list[torch.Tensor]:
        self.now += (3 + (len(requests) - 1) / 4) / 1000
        return [torch.zeros(1, 5) for _ in requests]


def test_with_packed_drafts_separates_levels_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = PackedModel()
    monkeypatch.setattr(profile_cuda, "perf_counter", lambda: model.now)
    latency = with_packed_drafts(LatencyModel(20.0, 1.0), model, prompt=4)
    assert PACKED_ROWS > 1
    assert latency.drafter_level_ms == pytest.approx(2.0)
    assert latency.drafter_per_token_ms == pytest.approx(0.25)
