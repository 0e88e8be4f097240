"""Two hosts, each with a network of its own, and what may happen between them.

The second host is a network namespace of this machine with a Ray node in it; it takes root to make one.
"""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip to make network namespaces"
)

RUN_ID = os.getpid() % 250  # of this run of tests: another may be at it at the same time
HERE, THERE, PORT = f"10.77.{RUN_ID}.1", f"10.77.{RUN_ID}.2", 6390
RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
QUIET = "--include-dashboard=false --disable-usage-stats"
DRIVER = """
    import json, subprocess
    from dsi.core.policies import autoregressive, distributed
    from dsi.fleets.loop import EngineLoop
    from dsi.fleets.ray_actors import RayFleet, ResourceRequest
    from dsi.planning.latency import LatencyModel
    from dsi.planning.simulation import SECOND, SimulationConfig
    from dsi.core.request import Request

    SETTING = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=300)
    [plain] = EngineLoop(SETTING.simulated(3)).run(Request((1, 2, 3), 300, autoregressive()))
    near, far = ResourceRequest(0.1, node=HERE), ResourceRequest(0.1, node=THERE)
    resources = {"target-1": near, "target-2": far, "drafter": near}
    servers = SETTING.servers(3, SECOND)
    fleet = RayFleet(servers, address=f"{HERE}:{PORT}", resources=resources, hang_seconds=2.0, **OPTIONS)
    fleet.wait_until_ready()
    loop, cut, texts = EngineLoop(fleet), not CUT, []
    while not texts or (CUT and not fleet.deaths):  # what it was at may not have been waited for
        run = loop.submit(Request((1, 2, 3), 300, distributed(2)))
        while not run.done:
            loop.step()
            if len(run.tokens) > 100 and not cut:
                cut = True
                subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
        texts.append(run.completion().tokens)
    busy = {name: float(seconds) for name, seconds in fleet.busy.items()}
    equal = all(text == plain.tokens for text in texts)
    print(json.dumps({"equal": equal, "deaths": fleet.deaths, "busy": busy}))
"""


def sh(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True, timeout=60)


@dataclass
class Hosts:
    name: str
    link: str

    def drive(self, cut: bool = False, **options: object) -> dict[str, object]:
        names = {
            "HERE": HERE,
            "THERE": THERE,
            "PORT": PORT,
            "LINK": self.link,
            "CUT": cut,
            "OPTIONS": options,
        }
        head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        code = head + textwrap.dedent(DRIVER)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made, far = Hosts(f"dsi-there-{RUN_ID}", f"dsi-here-{RUN_ID}"), f"dsi-far-{RUN_ID}"
    inside = f"ip netns exec {made.name}"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        sh(f"ip netns add {made.name}")
        sh(f"ip link add {made.link} type veth peer name {far}")
        sh(f"ip link set {far} netns {made.name}")
        sh(f"ip addr add {HERE}/24 dev {made.link}")
        sh(f"ip link set {made.link} up")
        for line in (f"ip addr add {THERE}/24 dev {far}", f"ip link set {far} up", "ip link set lo up"):
            sh(f"{inside} {line}")
        nodes.append(node(f"{RAY} start --head --block --node-ip-address={HERE} --port={PORT} {QUIET}", HERE))
        nodes.append(node(f"{inside} {RAY} start --block --address={HERE}:{PORT} --node-ip-address={THERE}", THERE))
        yield made
    finally:
        for each in nodes:
            each.kill()
            each.wait()
            each.stdout.close()  # type: ignore[union-attr]
        for address in (HERE, THERE):  # and no other Ray of this machine
            sh(f"pkill -9 -f ={address}", check=False)
        sh(f"ip netns del {made.name}", check=False)
        sh(f"ip link del {made.link}", check=False)


def node(command: str, address: str) -> "subprocess.Popen[bytes]":
    """A Ray node, once it runs."""
    found = subprocess.Popen(
        [*command.split(), "--num-cpus=1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT
    )
    for line in found.stdout or ():
        if b"Ray runtime started" in line:
            threading.Thread(target=lambda: deque(found.stdout or (), 0), daemon=True).start()
            return found
    found.wait()
    raise RuntimeError(f"no Ray at {address}")


def test_ray_fleet_loses_no_token_when_a_node_is_cut_off(hosts: Hosts) -> None:
    found = hosts.drive(cut=True)
    assert found["equal"]
    assert found["deaths"] == {"target-2": 1}
    assert found["busy"]["target-2"] > 0  # type: ignore[index]


class LossyProxy:
    """A proxy between the hosts that delays each chunk, and now and then loses one and sends it again."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int], seconds: float, lost: float) -> None:
        self._at, self._to, self._seconds, self._lost = at, to, seconds, lost
        self._rng, self.chunks, self.losses = Random(1), 0, 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "LossyProxy":
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        async with await asyncio.start_server(self._join, *self._at):
            self._ready.set()
            await self._end.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._to)
        try:
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer), return_exceptions=True)
        finally:  # a connection that is still open when the proxy ends is closed with it
            for end in (writer, back):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            self.chunks += 1
            lost = self._rng.random() < self._lost
            self.losses += lost
            await asyncio.sleep(self._seconds + 0.2 * lost)  # after which it is sent again
            writer.write(chunk)
        writer.close()


def test_ray_fleet_loses_no_token_on_a_slow_lossy_network(hosts: Hosts) -> None:
    listen, reach = (HERE, 7101), (HERE, 7102)
    with LossyProxy(reach, listen, seconds=0.005, lost=0.01) as road:
        found = hosts.drive(listen=listen, reach=reach)
    assert found["equal"]
    assert found["deaths"] == {}
    assert found["busy"]["target-2"] > 0  # type: ignore[index]
    assert road.chunks > 100
    assert road.losses > 0
