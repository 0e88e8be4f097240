"""Which targets are taken first where they share their ways to the memory."""

from collections.abc import Sequence
from typing import Any

import pytest

from dsi.engine import profile_cuda as concurrent
from dsi.engine.profile_cuda import in_order


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd and even ones share a way each, which takes two without a loss."""

    def together(models: Sequence[Any], *_: Any) -> float:
        busiest: int = max(sum(model % 2 == half for model in models) for half in (0, 1))
        return 10.0 + len(models) + 5.0 * max(0, busiest - 2)

    monkeypatch.setattr(concurrent, "together", together)


@pytest.mark.usefixtures("halves")
def test_those_that_crowd_each_other_least_come_first() -> None:
    models: list[Any] = [1, 3, 5, 7, 2, 4, 6]
    found = in_order(models)
    assert sorted(found) == sorted(models)
    assert found[0] == 1  # one alone is as good as another
    assert sum(model % 2 for model in found[:4]) == 2


@pytest.mark.usefixtures("halves")
def test_one_or_two_stay_as_they_are() -> None:
    assert in_order([]) == []
    assert in_order([3, 1]) == [3, 1]  # type: ignore[list-item]
