"""When dead workers are replaced."""

from math import inf

from dsi.fleets.worker_restarts import MAX_PAUSE, WorkerRestarts


def pauses(restarts: WorkerRestarts, count: int) -> list[float]:
    lengths = []
    for _ in range(count):
        restarts.on_death("target-1", 100.0)
        lengths.append(restarts.next_due - 100.0)
        assert restarts.take_due(100.0 + lengths[-1]) == ["target-1"]
    return lengths


def test_restarts_pause_longer_after_each_death() -> None:
    assert pauses(WorkerRestarts(True), 6) == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]


def test_restarts_never_end() -> None:
    assert pauses(WorkerRestarts(True), 2000)[-1] == MAX_PAUSE


def test_restarts_begin_anew_after_an_answer() -> None:
    restarts = WorkerRestarts(True)
    pauses(restarts, 5)
    restarts.on_answer("target-1")
    assert pauses(restarts, 2) == [0.0, 0.25]


def test_restarts_are_due_once() -> None:
    restarts = WorkerRestarts(True)
    restarts.on_death("target-1", 1.0)
    assert (restarts.take_due(1.0), restarts.take_due(1.0), restarts.next_due) == (["target-1"], [], inf)


def test_restarts_can_be_disabled() -> None:
    restarts = WorkerRestarts(False)
    restarts.on_death("target-1", 1.0)
    assert (restarts.take_due(1000.0), restarts.next_due) == ([], inf)
