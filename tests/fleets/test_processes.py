"""Real processes: what only they have."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dsi.core.messages import Failed, Verified, Verify
from dsi.core.policies import autoregressive, distributed
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.remote import MAX_RESTARTS
from dsi.fleets.worker import Server
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SETTING = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=40)
REQUEST = Request((1, 2, 3), 40, distributed(2))


def fleet() -> ProcessFleet:
    return ProcessFleet(SETTING.servers(3, unit=1000))


def alone() -> tuple[int, ...]:
    [done] = EngineLoop(SETTING.simulated(3)).run(Request((1, 2, 3), 40, autoregressive()))
    return done.tokens


def pids(of: ProcessFleet) -> list[int]:
    return [seat.process.pid or 0 for seat in of._workers.values()]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


def test_process_fleet_replaces_dead_workers() -> None:
    at = fleet()
    text: list[int] = []
    killed = False
    for tokens in EngineLoop(at).tokens(REQUEST):
        text += tokens
        if len(text) > 10 and not killed:
            killed = True
            before = pids(at)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
    assert tuple(text) == alone()
    assert not set(pids(at)) & set(before)
    assert set(at.deaths) == {"target-1", "target-2", "drafter"}
    at.close()


def test_process_fleet_gives_up_a_server_that_keeps_dying() -> None:
    class Deadly:
        def answer(self, request: ForwardRequest) -> tuple[int, ...]:  # noqa: ARG002
            os._exit(1)

    at = ProcessFleet([Server("target-1", "target", Deadly())])
    text = TokenSequence.of((1,))
    reasons = []
    for id in range(MAX_RESTARTS + 2):
        at.start(Verify(id, text, 1))
        event = at.next_event()
        assert isinstance(event, Failed)
        reasons.append(event.reason)
    assert reasons == ["server target-1 died"] * (MAX_RESTARTS + 1) + ["no target server is left"]
    at.close()


def test_process_fleet_always_replaces_a_server_that_answers_between_deaths() -> None:
    at = ProcessFleet([Server("target-1", "target", ToyTarget(3))])
    for id in range(MAX_RESTARTS + 3):
        at.start(Verify(id, TokenSequence.of((1,)), 1))
        assert isinstance(at.next_event(), Verified)
        at.kill("target-1")
    assert at.servers() == [("target-1", "target", True)]
    assert at.deaths == {"target-1": MAX_RESTARTS + 3}
    at.close()


def test_worker_process_closes_its_parents_file_descriptors() -> None:
    one, other = socket.socketpair()
    at = ProcessFleet([Server("target-1", "target", ToyTarget(3))])
    at.start(Verify(1, TokenSequence.of((1,)), 1))
    at.next_event()  # it has begun
    one.close()
    other.settimeout(5)
    assert other.recv(1) == b""  # or it would wait for the server's end of it
    other.close()
    at.close()


def test_process_fleet_close_leaves_no_process() -> None:
    at = fleet()
    EngineLoop(at).submit(REQUEST)
    running = pids(at)
    at.close()
    assert all(gone(pid) for pid in running)


SCRIPT = """
    import os, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background has not got
    sys.path.insert(0, {here!r})
    from test_processes import REQUEST, fleet, pids
    from dsi.fleets.loop import EngineLoop
    at = fleet()
    EngineLoop(at).submit(REQUEST)
    print(*pids(at), flush=True)
    {ending}
"""


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(0)",
        "raise ValueError('a crash')",
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), 2); time.sleep(60)",
    ],
)
def test_worker_process_dies_with_its_parent(ending: str) -> None:
    """An exit, a crash, a kill and a Ctrl-C."""
    code = textwrap.dedent(SCRIPT).format(here=str(Path(__file__).parent), ending=ending)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    orphans = [int(pid) for pid in done.stdout.split()]
    assert len(orphans) == 3
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in orphans) and time.monotonic() < deadline:
        os.sched_yield()
    assert all(gone(pid) for pid in orphans)


def test_worker_process_is_pinned_to_its_cores() -> None:
    class Where:
        def answer(self, request: ForwardRequest) -> tuple[int, ...]:  # noqa: ARG002
            return (min(os.sched_getaffinity(0)) * 100 + len(os.sched_getaffinity(0)),)

    core = max(os.sched_getaffinity(0))
    at = ProcessFleet([Server("target-1", "target", Where())], cores={"target-1": [core]})
    at.start(Verify(1, TokenSequence.of((1,)), 1))
    assert at.next_event() == Verified(1, (core * 100 + 1,))
    at.close()
