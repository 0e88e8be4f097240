"""Which slices of a GPU are used first where they share its memory bandwidth."""

from collections.abc import Sequence
from typing import Any

import pytest

from dsi.engine import profile_cuda
from dsi.engine.profile_cuda import order_by_contention


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
