"""Forwards that follow one another, on a processor whose clock stands still until told."""

from collections.abc import Iterator

import pytest

from dsi.models.cuda import draft_pipeline as chain
from dsi.models.cuda.draft_pipeline import LEAD, DraftPipeline
from dsi.models.protocol import NEVER, CancelFlag, Cancelled

PIECE = 10 * LEAD  # what a piece takes


class Processor:
    """It does what it is sent, one piece after the other."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.sent: list[tuple[str, int, float]] = []  # which piece of which forward, and when


class Mark:
    def __init__(self, processor: Processor, end: float) -> None:
        self._processor, self._end = processor, end

    def query(self) -> bool:
        return self._processor.now >= self._end


class CudaForward:
    def __init__(self, name: str, processor: Processor, segments: int) -> None:
        self.name, self.processor, self.segments = name, processor, segments

    def launch(self, piece: int, after: object, cancelled: CancelFlag) -> Mark:  # noqa: ARG002
        processor = self.processor
        processor.sent.append((self.name, piece, processor.now))
        processor.free = max(processor.free, processor.now) + PIECE
        return Mark(processor, processor.free)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    found = Processor()
    monkeypatch.setattr(chain, "perf_counter", lambda: found.now)
    return found


def wait(steps: Iterator[None], processor: Processor) -> None:
    for _ in steps:
        processor.now += LEAD / 4


def test_pieces_and_forwards_follow_without_a_gap_once_their_times_are_known(processor: Processor) -> None:
    first, *turns = (CudaForward(name, processor, 2) for name in ("first", "even", "odd"))
    seconds: dict[int, float] = {}
    link = DraftPipeline(first, NEVER, seconds)
    for place in range(8):
        wait(link.ended(turns[place % 2] if place < 7 else None), processor)
    assert [name for name, piece, _ in processor.sent if piece == 0] == ["first", *["even", "odd"] * 4][:8]
    assert [piece for _, piece, _ in processor.sent] == [0, 1] * 8
    assert processor.now == pytest.approx(16 * PIECE, rel=0.02)
    assert seconds == {0: pytest.approx(PIECE, rel=0.05), 1: pytest.approx(PIECE, rel=0.05)}


def test_the_next_is_sent_only_shortly_before_the_end(processor: Processor) -> None:
    link = DraftPipeline(CudaForward("first", processor, 1), NEVER, {0: PIECE})
    wait(link.ended(CudaForward("next", processor, 1)), processor)
    [_, (name, _, when)] = processor.sent
    assert name == "next"
    assert PIECE - LEAD < when < PIECE - LEAD / 2


def test_a_cancelled_chain_sends_nothing_more_and_waits_for_nothing(processor: Processor) -> None:
    class Gone:
        gone = False

        def is_set(self) -> bool:
            return self.gone

        def wait(self, timeout: float) -> bool:  # noqa: ARG002
            return self.gone

    flag = Gone()
    steps = DraftPipeline(CudaForward("first", processor, 2), flag, {}).ended(CudaForward("next", processor, 2))
    next(steps)
    flag.gone = True
    with pytest.raises(Cancelled):
        next(steps)
    assert [piece for _, piece, _ in processor.sent] == [0, 1]
    assert processor.now == 0
