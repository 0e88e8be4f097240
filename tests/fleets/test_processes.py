"""Real processes: what only they have."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsi.core.generation import Policy
from dsi.core.messages import Draft, Drafted, Failed, Verified, Verify
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import FORK, ProcessFleet, run_in_thread
from dsi.fleets.servers import Server
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget
from dsi.models.wait import Latency, Wait
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SETTING = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=40)
ALGORITHMS = [autoregressive(), speculative(3), pearl(3), distributed(2, min_draft=1)]
REQUEST = Request((1, 2, 3), 40, distributed(2))


Make = Callable[..., ProcessFleet]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ProcessFleet] = []

    def build(servers: list[Server] | None = None, **options: Any) -> ProcessFleet:
        made.append(ProcessFleet(servers or SETTING.servers(3, unit=1000), **options))
        return made[-1]

    yield build
    for fleet in made:
        fleet.close()


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


def test_process_fleet_replaces_dead_workers(make: Make) -> None:
    fleet = make()
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


def test_process_fleet_never_gives_up_a_server_that_keeps_dying(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Deadly:
        def answer(self, request: ForwardRequest) -> tuple[int, ...]:  # noqa: ARG002
            os._exit(1)

    monkeypatch.setattr("dsi.fleets.worker_restarts.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("dsi.fleets.worker_restarts.MAX_PAUSE", 0.02)
    fleet = make([Server("target-1", "target", Deadly())])
    for id in range(12):
        fleet.start(Verify(id, TokenSequence.of((1,)), 1))
        assert fleet.next_event() == Failed(id, "server target-1 died")
    assert fleet.death_causes == {"target-1": {"died": 12}}
    assert fleet.restarts["target-1"] in (11, 12)
    assert caplog.messages == ["server target-1: ended with status 1"] * 12


def test_process_fleet_restarts_after_growing_pauses_while_idle(make: Make) -> None:
    fleet = make([Server("target-1", "target", ToyTarget(3))])
    for _ in range(2):
        os.kill(pids(fleet)[0], signal.SIGKILL)
        until(fleet, lambda: not fleet.servers()[0][2] or fleet.restarts["target-1"] == 1)
    until(fleet, lambda: fleet.deaths == {"target-1": 2})
    assert fleet.servers() == [("target-1", "target", False)]  # the second pause is not over yet
    until(fleet, lambda: fleet.servers() == [("target-1", "target", True)])
    fleet.start(Verify(1, TokenSequence.of((1,)), 1))
    assert isinstance(fleet.next_event(), Verified)


def until(fleet: ProcessFleet, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        fleet.check_workers()
        time.sleep(0.005)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("stopped", ["drafter", "target-1"])
def test_process_fleet_replaces_a_worker_that_hangs(make: Make, stopped: str, algorithm: Policy) -> None:
    fleet = make(hang_seconds=0.5)
    text: list[int] = []
    for tokens in EngineLoop(fleet).tokens(replace(REQUEST, policy=algorithm)):
        text += tokens
        if len(text) > 10 and stopped:
            os.kill(fleet._workers[stopped].process.pid or 0, signal.SIGSTOP)
            stopped, killed = "", stopped
    assert tuple(text) == plain_decoding()
    if algorithm is ALGORITHMS[1]:  # SI waits for either; the others may have gone on without
        assert fleet.death_causes == {killed: {"hung": 1}}


def test_process_fleet_replaces_a_worker_that_hangs_in_its_first_forward(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsi.fleets.hang_limits.FIRST_SECONDS", 0.5)
    fleet = make()
    fleet.expect_forward("drafter", 0.001)
    os.kill(fleet._workers["drafter"].process.pid or 0, signal.SIGSTOP)
    [done] = EngineLoop(fleet).run(replace(REQUEST, policy=speculative(3)))
    assert done.tokens == plain_decoding()
    assert fleet.death_causes == {"drafter": {"hung": 1}}


def test_process_fleet_replaces_a_worker_that_takes_no_message(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsi.fleets.processes.SEND_SECONDS", 0.2)
    fleet = make([Server("target-1", "target", ToyTarget(3))])
    os.kill(pids(fleet)[0], signal.SIGSTOP)
    fleet.start(Verify(1, TokenSequence.of(range(300_000)), 1))
    assert fleet.next_event() == Failed(1, "server target-1 died")


def test_process_fleet_that_was_stopped_itself_drops_no_worker(make: Make) -> None:
    fleet = make([Server("target-1", "target", Wait(ToyTarget(3), Latency(0.6)))], hang_seconds=2.0)
    fleet.start(Verify(1, TokenSequence.of((1,)), 1))
    fleet._checked_at -= 1000.0  # as after Ctrl-Z and fg
    assert isinstance(fleet.next_event(), Verified)
    assert fleet.deaths == {}


def test_process_fleet_always_replaces_a_server_that_answers_between_deaths(make: Make) -> None:
    fleet = make([Server("target-1", "target", ToyTarget(3))])
    for id in range(8):
        fleet.start(Verify(id, TokenSequence.of((1,)), 1))
        assert isinstance(fleet.next_event(), Verified)
        fleet.kill("target-1")
    assert fleet.servers() == [("target-1", "target", True)]
    assert fleet.deaths == fleet.restarts == {"target-1": 8}


def test_worker_process_closes_its_parents_file_descriptors(make: Make) -> None:
    one, other = socket.socketpair()
    fleet = make([Server("target-1", "target", ToyTarget(3))])
    fleet.start(Verify(1, TokenSequence.of((1,)), 1))
    fleet.next_event()  # it has begun
    one.close()
    other.settimeout(5)
    assert other.recv(1) == b""  # or it would wait for the server's end of it
    other.close()


def test_process_fleet_close_leaves_no_process() -> None:
    fleet = ProcessFleet(SETTING.servers(3, unit=1000))
    EngineLoop(fleet).submit(REQUEST)
    running = pids(fleet)
    fleet.close()
    assert all(gone(pid) for pid in running)


SCRIPT = """
    import os, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background has not got
    sys.path.insert(0, {here!r})
    from test_processes import REQUEST, SETTING, pids
    from dsi.fleets.loop import EngineLoop
    from dsi.fleets.processes import ProcessFleet
    fleet = ProcessFleet(SETTING.servers(3, unit=1000))
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


class OwnProcess:
    """Answers with the process it runs in."""

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        return (os.getpid(),) * request.num_positions


def inline_fleet() -> ProcessFleet:
    servers = [Server("target-1", "target", OwnProcess()), Server("drafter", "drafter", OwnProcess())]
    inline = {server.role: Server(server.name, server.role, OwnProcess()) for server in servers}
    return ProcessFleet(servers, use_cores=lambda *_: None, inline=inline)


def test_process_fleet_runs_jobs_that_take_turns_in_this_process() -> None:
    fleet, text, here = inline_fleet(), TokenSequence.of((1,)), os.getpid()
    fleet.start(Draft(0, text, 2, alone=True))
    fleet.log = []
    assert [fleet.next_event(), fleet.next_event()] == [Drafted(0, here), Drafted(0, here)]
    assert [tuple(span.context) for span in fleet.log] == [(1,), (1, here)]
    fleet.start(Verify(1, text, 1, alone=True))
    assert fleet.next_event() == Verified(1, (here,))
    fleet.start(Verify(2, text, 1))
    event = fleet.next_event()
    assert isinstance(event, Verified)
    assert event.tokens == (fleet._workers["target-1"].process.pid,)
    assert fleet.busy["drafter"] > 0
    fleet.close()


def test_process_fleet_leaves_long_prompts_to_workers() -> None:
    fleet, text = inline_fleet(), TokenSequence.of((1,) * 300)
    fleet.start(Verify(0, text, 1, alone=True))
    event = fleet.next_event()
    assert isinstance(event, Verified)
    assert event.tokens == (fleet._workers["target-1"].process.pid,)
    fleet.close()


def test_process_fleet_does_not_count_on_workers_for_what_ran_in_this_process() -> None:
    fleet, text = inline_fleet(), TokenSequence.of((1,) * 40)
    fleet.start(Verify(0, text, 1, alone=True))
    fleet.next_event()
    assert fleet._scheduler.num_new("target-1", Verify(1, text.then(5), 1)) == 41
    fleet.close()


class Interrupted:
    """Is interrupted by Ctrl-C the first time."""

    count = 0

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:  # noqa: ARG002
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt
        return (7,)


def test_process_fleet_goes_on_after_an_interruption_in_this_process() -> None:
    server = Server("target-1", "target", Interrupted())
    fleet, text = ProcessFleet([server], use_cores=lambda *_: None, inline={"target": server}), TokenSequence.of((1,))
    fleet.start(Verify(0, text, 1, alone=True))
    with pytest.raises(KeyboardInterrupt):
        fleet.next_event()
    fleet.start(Verify(1, text, 1, alone=True))
    assert fleet.next_event() == Verified(1, (7,))
    fleet.close()


def test_process_fleet_forgets_a_cancelled_job_of_this_process() -> None:
    fleet, text = inline_fleet(), TokenSequence.of((1,))
    fleet.start(Verify(0, text, 1, alone=True))
    fleet.cancel(0)
    fleet.start(Verify(1, text, 1, alone=True))
    assert fleet.next_event() == Verified(1, (os.getpid(),))
    fleet.close()


def test_process_fleet_fails_a_job_of_this_process_whose_server_dies() -> None:
    fleet, text = inline_fleet(), TokenSequence.of((1,))
    fleet.start(Draft(0, text, 1, alone=True))
    fleet.kill("drafter")
    assert isinstance(fleet.next_event(), Failed)
    fleet.start(Verify(1, text, 1, alone=True))
    assert fleet.next_event() == Verified(1, (os.getpid(),))
    fleet.close()


class Busy:
    """A model whose forwards compute for so many seconds, by the clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return (1,) * request.num_positions


@pytest.mark.slow
def test_process_fleet_counts_what_its_threads_have_waited_for_a_core(make: Make) -> None:
    core = min(os.sched_getaffinity(0))
    fleet = make([Server("target-1", "target", Busy(0.3))], cores={"target-1": [core]})
    other = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"])
    try:
        time.sleep(0.3)  # until it computes
        before = sum(fleet.seconds_without_core().values())
        fleet.start(Verify(0, TokenSequence.of((1,)), 1))
        fleet.next_event()
        assert sum(fleet.seconds_without_core().values()) - before > 0.05
    finally:
        other.kill()
        other.wait()


def multiply() -> None:
    torch.set_num_threads(2)
    torch.ones(256, 256).matmul(torch.ones(256, 256)).sum().item()


def test_run_in_thread_computes_with_threads_in_a_process_forked_after_others_did() -> None:
    threads = torch.get_num_threads()
    try:
        multiply()
        process = FORK.Process(target=run_in_thread, args=(multiply,), daemon=True)
        process.start()
        process.join(30)
        assert process.exitcode == 0
    finally:
        torch.set_num_threads(threads)
