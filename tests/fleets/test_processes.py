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

from dsi.core.messages import Draft, Failed, Verified, Verify
from dsi.core.policies import autoregressive, distributed
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.servers import Server
from dsi.fleets.worker_restarts import MAX_RESTARTS
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget
from dsi.models.wait import Latency, Wait
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SETTING = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=40)
REQUEST = Request((1, 2, 3), 40, distributed(2))


def make_fleet() -> ProcessFleet:
    return ProcessFleet(SETTING.servers(3, unit=1000))


def plain_decoding() -> tuple[int, ...]:
    [done] = EngineLoop(SETTING.simulated(3)).run(Request((1, 2, 3), 40, autoregressive()))
    return done.tokens


def pids(of: ProcessFleet) -> list[int]:
    return [worker.process.pid or 0 for worker in of._workers.values()]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


def test_process_fleet_replaces_dead_workers() -> None:
    fleet = make_fleet()
    text: list[int] = []
    killed = False
    for tokens in EngineLoop(fleet).tokens(REQUEST):
        text += tokens
        if len(text) > 10 and not killed:
            killed = True
            before = pids(fleet)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
    assert tuple(text) == plain_decoding()
    assert not set(pids(fleet)) & set(before)
    assert set(fleet.deaths) == {"target-1", "target-2", "drafter"}
    fleet.close()


def test_process_fleet_gives_up_a_server_that_keeps_dying() -> None:
    class Deadly:
        def answer(self, request: ForwardRequest) -> tuple[int, ...]:  # noqa: ARG002
            os._exit(1)

    fleet = ProcessFleet([Server("target-1", "target", Deadly())])
    text = TokenSequence.of((1,))
    reasons = []
    for id in range(MAX_RESTARTS + 2):
        fleet.start(Verify(id, text, 1))
        event = fleet.next_event()
        assert isinstance(event, Failed)
        reasons.append(event.reason)
    assert reasons == ["server target-1 died"] * (MAX_RESTARTS + 1) + ["no target server is left"]
    fleet.close()


def test_process_fleet_always_replaces_a_server_that_answers_between_deaths() -> None:
    fleet = ProcessFleet([Server("target-1", "target", ToyTarget(3))])
    for id in range(MAX_RESTARTS + 3):
        fleet.start(Verify(id, TokenSequence.of((1,)), 1))
        assert isinstance(fleet.next_event(), Verified)
        fleet.kill("target-1")
    assert fleet.servers() == [("target-1", "target", True)]
    assert fleet.deaths == {"target-1": MAX_RESTARTS + 3}
    fleet.close()


def test_worker_process_closes_its_parents_file_descriptors() -> None:
    one, other = socket.socketpair()
    fleet = ProcessFleet([Server("target-1", "target", ToyTarget(3))])
    fleet.start(Verify(1, TokenSequence.of((1,)), 1))
    fleet.next_event()  # it has begun
    one.close()
    other.settimeout(5)
    assert other.recv(1) == b""  # or it would wait for the server's end of it
    other.close()
    fleet.close()


def test_process_fleet_close_leaves_no_process() -> None:
    fleet = make_fleet()
    EngineLoop(fleet).submit(REQUEST)
    running = pids(fleet)
    fleet.close()
    assert all(gone(pid) for pid in running)


SCRIPT = """
    import os, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background has not got
    sys.path.insert(0, {here!r})
    from test_processes import REQUEST, make_fleet, pids
    from dsi.fleets.loop import EngineLoop
    fleet = make_fleet()
    EngineLoop(fleet).submit(REQUEST)
    print(*pids(fleet), flush=True)
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
    fleet = ProcessFleet([Server("target-1", "target", Where())], cores={"target-1": [core]})
    fleet.start(Verify(1, TokenSequence.of((1,)), 1))
    assert fleet.next_event() == Verified(1, (core * 100 + 1,))
    fleet.close()


class CoresUsed:
    """Answers whether it may use every core."""

    every = False

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:  # noqa: ARG002
        return (int(self.every),)


def test_process_fleet_lets_a_job_use_every_core_if_nothing_else_computes() -> None:
    def use_cores(server: Server, is_alone: bool) -> None:
        server.model.every = is_alone  # type: ignore[attr-defined]

    slow = ProcessFleet(
        [Server("target-1", "target", CoresUsed()), Server("drafter", "drafter", Wait(ToyTarget(3), Latency(0.5)))],
        use_cores=use_cores,
    )
    text, used = TokenSequence.of((1,)), []
    for id, alone in enumerate((True, False, True)):
        slow.start(Verify(id, text, 1, alone=alone))
        used.append(slow.next_event())
    slow.start(Draft(3, text, 1, alone=True))
    slow.start(Verify(4, text, 1, alone=True))
    used.append(slow.next_event())
    assert [event.tokens for event in used if isinstance(event, Verified)] == [(1,), (0,), (1,), (0,)]
    slow.close()
