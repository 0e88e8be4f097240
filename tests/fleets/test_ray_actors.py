"""Ray fleets: resources, connections, and faults in workers."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsi.core.messages import Verified, Verify
from dsi.core.policies import autoregressive, distributed
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.fleets.loop import EngineLoop, FleetError
from dsi.fleets.ray_actors import HELLO, ActorWorker, RayFleet, ResourceRequest, check_reachable, parse_resources, ray
from dsi.fleets.servers import Server
from dsi.models.toy import ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from ray_faults import faulty_worker

pytest.importorskip("ray")

SETTING = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=60)
SMALL = {"target": ResourceRequest(cpus=0.01), "drafter": ResourceRequest(cpus=0.01)}
Make = Callable[..., RayFleet]


def plain_decoding(tokens: int = 60) -> tuple[int, ...]:
    [done] = EngineLoop(SETTING.simulated(3)).run(Request((1, 2, 3), tokens, autoregressive()))
    return done.tokens


@pytest.fixture
def make(cluster: None) -> Iterator[Make]:  # noqa: ARG001
    made: list[RayFleet] = []

    def build(servers: list[Server] | None = None, **options: object) -> RayFleet:
        servers_used = servers or SETTING.servers(3, unit=1000)
        made.append(RayFleet(servers_used, **{"resources": SMALL, **options}))  # type: ignore[arg-type]
        made[-1].wait_until_ready()
        return made[-1]

    yield build
    for fleet in made:
        fleet.close()


CASES = [  # what, how, every how many of them, how often at least
    ("answer", "twice", 3, 6),
    ("answer", "late", 9, 2),
    ("cancel", "lose", 1, 6),
    ("verify", "late", 9, 2),
    ("draft", "late", 2, 2),
    ("verify", "die", 12, 2),
    ("draft", "die", 3, 2),
    ("answer", "die", 15, 2),
    ("cancel", "die", 3, 2),
    ("prefill", "die", 2, 1),
    ("verify", "hang", 14, 2),
    ("answer", "hang", 25, 1),
]


@pytest.mark.parametrize(("kind", "fault", "every", "least"), CASES, ids=[f"{k} {f}" for k, f, *_ in CASES])
def test_ray_fleet_output_survives_faults(
    make: Make, tmp_path: Path, kind: str, fault: str, every: int, least: int
) -> None:
    log = tmp_path / "log"
    log.touch()
    fleet = make(worker=faulty_worker(kind, fault, every, log), hang_seconds=1.0)
    loop, expected = EngineLoop(fleet), plain_decoding()
    end = time.monotonic() + 60
    while len(log.read_text().splitlines()) < least:
        assert time.monotonic() < end
        [done] = loop.run(Request((1, 2, 3), 60, distributed(2)))
        assert done.tokens == expected


def test_fault_cases_cover_every_kind() -> None:
    assert sum(least for *_, least in CASES) >= 30
    assert {kind for kind, *_ in CASES} == {"answer", "cancel", "draft", "verify", "prefill"}
    assert {fault for _, fault, *_ in CASES} == {"die", "hang", "late", "lose", "twice"}


def test_ray_fleet_uses_a_target_added_midway(make: Make) -> None:
    fleet = make([*SETTING.servers(3, unit=1000)[1:]])
    loop = EngineLoop(fleet)
    run = loop.submit(Request((1, 2, 3), 400, distributed(2)))
    target = SETTING.servers(3, unit=1000)[0]
    while not run.done:
        loop.step()
        if len(run.tokens) > 20 and "new" not in fleet.busy:
            fleet.add(Server("new", "target", target.model))
    assert run.completion().tokens == plain_decoding(400)
    assert fleet.busy["new"] > 0


def test_ray_fleet_without_targets_raises(make: Make) -> None:
    fleet = make(restart=False)
    loop = EngineLoop(fleet)
    run = loop.submit(Request((1, 2, 3), 5000, distributed(2)))
    for name in ("target-1", "target-2"):
        fleet.kill(name)
    while not run.done:
        loop.step()
    with pytest.raises(FleetError, match="no target server is left"):
        run.completion()


def test_ray_fleet_reports_a_server_that_cannot_start(cluster: None) -> None:  # noqa: ARG001
    fleet = RayFleet(
        [Server("target-1", "target", ToyTarget(3))],
        resources={"target": ResourceRequest(cpus=1000)},
        start_seconds=2.0,
    )
    with pytest.raises(ValueError, match=r"target-1: not there after 2 s; the cluster has 4 CPUs and 0 GPUs"):
        fleet.wait_until_ready()
    fleet.close()


def test_ray_fleet_tries_again_after_an_actor_that_died_before_it_connected(make: Make) -> None:
    class Starting(ActorWorker):
        def run(self, address: tuple[str, int], secret: bytes, incarnation: int) -> None:
            if incarnation in (2, 3):
                os._exit(1)
            super().run(address, secret, incarnation)

    ray().cloudpickle.register_pickle_by_value(sys.modules[__name__])
    fleet = make([Server("target-1", "target", ToyTarget(3))], worker=Starting)
    fleet.kill("target-1")
    fleet.start(Verify(1, TokenSequence.of((1,)), 1))
    assert isinstance(fleet.next_event(), Verified)
    assert fleet.death_causes == {"target-1": {"died": 1, "not started": 2}}


def test_ray_fleet_rejects_connections_without_the_secret(make: Make) -> None:
    fleet = make([Server("target-1", "target", ToyTarget(3))])
    with socket.create_connection(fleet._listen_socket.getsockname()[:2]) as stranger:
        stranger.sendall(HELLO.pack(b"x" * 32, b"target-1", 1, 0.0, False) + b"rest")
        fleet.start(Verify(1, TokenSequence.of((1,)), 1))
        assert isinstance(fleet.next_event(), Verified)
        fleet.start(Verify(2, TokenSequence.of((1,)), 1))
        assert isinstance(fleet.next_event(), Verified)
        stranger.settimeout(5)
        with pytest.raises((ConnectionResetError, BrokenPipeError, AssertionError)):
            assert stranger.recv(1) != b""
    assert fleet._pending_connections == []


def test_parse_resources_reads_all_fields() -> None:
    assert parse_resources("cpus=2,gpus=0.5") == ResourceRequest(cpus=2, gpus=0.5)
    assert parse_resources("node=10.0.0.2, label=zone:a") == ResourceRequest(node="10.0.0.2", labels={"zone": "a"})
    assert parse_resources("cpus=2,node=10.0.0.2").bundle == {"CPU": 2, "node:10.0.0.2": 0.001}
    for bad in ("", "cpus", "cpus=x", "room=3", "label=a", "cpus=-1"):
        with pytest.raises(ValueError, match="resources"):
            parse_resources(bad)


def test_check_reachable_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=f"ray at 127.0.0.1:{port}: nobody answers there"):
        check_reachable(f"127.0.0.1:{port}")


def test_ray_actor_dies_with_its_driver(cluster: None, tmp_path: Path) -> None:  # noqa: ARG001
    address = ray().get_runtime_context().gcs_address
    code = f"""
        import os, signal, time
        from dsi.fleets.ray_actors import RayFleet, ResourceRequest
        from dsi.fleets.servers import Server
        from dsi.models.toy import ToyTarget
        class RecordsPid(ToyTarget):
            def answer(self, ask):
                open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
                return super().answer(ask)
        from dsi.core.sequence import TokenSequence
        from dsi.core.messages import Verify
        resources = {{"t": ResourceRequest(0.01)}}
        fleet = RayFleet([Server("t", "target", RecordsPid(3))], address={address!r}, resources=resources)
        fleet.wait_until_ready()
        fleet.start(Verify(1, TokenSequence.of((1,)), 1))
        fleet.next_event()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end
        time.sleep(0.1)
