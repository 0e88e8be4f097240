"""The draft pipeline on a fake GPU with a manual clock."""

import threading
from collections.abc import Iterator

import pytest

from dsi.models.cuda import draft_pipeline
from dsi.models.cuda.draft_pipeline import LEAD, DraftPipeline
from dsi.models.protocol import NEVER, CancelFlag, Cancelled

SEGMENT_SECONDS = 10 * LEAD


class FakeGpu:
    """Runs segments in the order in which they are launched."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.launches: list[tuple[str, int, float]] = []  # forward, segment, time


class FakeEvent:
    def __init__(self, gpu: FakeGpu, end: float) -> None:
        self._gpu, self._end = gpu, end

    def query(self) -> bool:
        return self._gpu.now >= self._end


class FakeForward:
    def __init__(self, name: str, gpu: FakeGpu, segments: int) -> None:
        self.name, self.gpu, self.segments = name, gpu, segments

    def launch(self, segment: int, after: object, cancelled: CancelFlag) -> FakeEvent:  # noqa: ARG002
        gpu = self.gpu
        gpu.launches.append((self.name, segment, gpu.now))
        gpu.free = max(gpu.free, gpu.now) + SEGMENT_SECONDS
        return FakeEvent(gpu, gpu.free)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(draft_pipeline, "perf_counter", lambda: gpu.now)
    return gpu


def wait(steps: Iterator[None], gpu: FakeGpu) -> None:
    for _ in steps:
        gpu.now += LEAD / 4


def test_draft_pipeline_has_no_gaps_once_latencies_are_measured(gpu: FakeGpu) -> None:
    first, *followers = (FakeForward(name, gpu, 2) for name in ("first", "even", "odd"))
    seconds: dict[int, float] = {}
    pipeline = DraftPipeline(first, NEVER, seconds)
    for i in range(8):
        wait(pipeline.finish(followers[i % 2] if i < 7 else None), gpu)
    assert [name for name, segment, _ in gpu.launches if segment == 0] == ["first", *["even", "odd"] * 4][:8]
    assert [segment for _, segment, _ in gpu.launches] == [0, 1] * 8
    assert gpu.now == pytest.approx(16 * SEGMENT_SECONDS, rel=0.02)
    assert seconds == {0: pytest.approx(SEGMENT_SECONDS, rel=0.05), 1: pytest.approx(SEGMENT_SECONDS, rel=0.05)}


def test_draft_pipeline_launches_shortly_before_the_end(gpu: FakeGpu) -> None:
    pipeline = DraftPipeline(FakeForward("first", gpu, 1), NEVER, {0: SEGMENT_SECONDS})
    wait(pipeline.finish(FakeForward("next", gpu, 1)), gpu)
    [_, (name, _, launch_time)] = gpu.launches
    assert name == "next"
    assert SEGMENT_SECONDS - LEAD < launch_time < SEGMENT_SECONDS - LEAD / 2


def test_draft_pipeline_cancels_without_waiting(gpu: FakeGpu) -> None:
    flag = threading.Event()
    steps = DraftPipeline(FakeForward("first", gpu, 2), flag, {}).finish(FakeForward("next", gpu, 2))
    next(steps)
    flag.set()
    with pytest.raises(Cancelled):
        next(steps)
    assert [segment for _, segment, _ in gpu.launches] == [0, 1]
    assert gpu.now == 0
