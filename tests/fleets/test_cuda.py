"""What only a fleet that is looked at can do wrong."""

from collections.abc import Generator, Iterator

import pytest

from dsi.core.messages import Failed, Verify
from dsi.core.sequence import Tokens, TokenSequence
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.servers import Server
from dsi.models.protocol import ForwardRequest


class Interrupted:
    """A model during whose forward somebody presses Ctrl-C."""

    def answer(self, request: ForwardRequest) -> Tokens:
        raise NotImplementedError(str(request))

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:  # noqa: ARG002
        yield None
        raise KeyboardInterrupt

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:  # noqa: ARG002
        return iter([None] * count)


def test_cuda_fleet_fails_an_interrupted_job() -> None:
    fleet = CudaFleet([Server("target-1", "target", Interrupted())])
    fleet.start(Verify(7, TokenSequence.of((1, 2)), 1))
    with pytest.raises(KeyboardInterrupt):
        fleet.next_event()
    assert fleet.next_event() == Failed(7, "interrupted")
    fleet.close()
