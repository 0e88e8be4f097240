"""What only a fleet that is looked at can do wrong."""

from collections.abc import Generator, Iterator

import pytest

from dsi.core.context import Context, Tokens
from dsi.core.messages import Failed, Verify
from dsi.fleets.polling import PollingFleet
from dsi.fleets.work import Server
from dsi.models.backend import Ask


class Interrupted:
    """A model during whose forward somebody presses Ctrl-C."""

    def answer(self, ask: Ask) -> Tokens:
        raise NotImplementedError(str(ask))

    def answering(self, ask: Ask) -> Generator[None, None, Tokens]:  # noqa: ARG002
        yield None
        raise KeyboardInterrupt

    def guessing(self, ask: Ask, count: int) -> Iterator[int | None]:  # noqa: ARG002
        return iter([None] * count)


def test_a_job_that_an_interrupt_has_ended_fails_and_is_not_forgotten() -> None:
    fleet = PollingFleet([Server("target-1", "target", Interrupted())])
    fleet.start(Verify(7, Context.of((1, 2)), 1))
    with pytest.raises(KeyboardInterrupt):
        fleet.next_event()
    assert fleet.next_event() == Failed(7, "interrupted")
    fleet.close()
