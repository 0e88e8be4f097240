"""A fleet on a Ray cluster: each server an actor, wherever Ray finds room for it.

Ray places the servers and starts them again; what they say goes over a connection of their own, the same
messages as between processes: only what the other end lacks. A server that dies, hangs or loses its node is
replaced; meanwhile its job is another's. When the driver goes, they go.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from selectors import EVENT_READ, SelectorKey
from typing import Any

from dsi.core.messages import TARGET, Job
from dsi.core.stats import ServerUsage
from dsi.fleets.connection import Connection, Receiver
from dsi.fleets.remote import NOTHING, RemoteFleet, SharedCancelFlag, WorkerHandle, answer
from dsi.fleets.spans import Span
from dsi.fleets.worker import Server

HELLO = struct.Struct("!32s64sqd")  # a secret, the server's name, which life of it this is, its clock
CANCEL = "cancel"
HANG_SECONDS, START_SECONDS = 60.0, 120.0  # unless others are asked for
SEND_SECONDS = 5.0
LOOK_SECONDS = 0.25  # between two looks at who is late

Fault = Callable[[str], str | None]  # asked at each message what goes wrong with it: for tests


def ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError("a fleet on Ray needs Ray: pip install 'dsi[ray]'") from None
    return ray


@dataclass(frozen=True)
class ResourceRequest:
    """What a server asks of the machine it runs on."""

    cpus: float = 1.0
    gpus: float = 0.0
    node: str = ""  # the address of a machine
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        asked = {"CPU": self.cpus, "GPU": self.gpus, f"node:{self.node}" if self.node else "": 0.001}
        return {name: amount for name, amount in asked.items() if name and amount > 0}


def parse_resources(text: str) -> ResourceRequest:
    """`cpus=2,gpus=1,node=10.0.0.2,label=zone:a`, or some of it."""
    found: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            if name in ("cpus", "gpus"):
                found[name] = float(value)
            elif name == "node" and value:
                found[name] = value
            elif name == "label" and ":" in value:
                key, _, label = value.partition(":")
                labels[key] = label
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"resources {part.strip()!r}: must be cpus=N, gpus=N, node=ADDRESS or label=KEY:VALUE"
            ) from None
    if min(found.get("cpus", 1), found.get("gpus", 0)) < 0:
        raise ValueError(f"resources {text!r}: must be at least 0")
    return ResourceRequest(**found, labels=labels)


def resources_of(resources: Mapping[str, ResourceRequest], name: str, role: str) -> ResourceRequest:
    """By a server: what is said of it by its name, or else of its role."""
    return resources.get(name) or resources.get(role) or ResourceRequest()


class Number:
    """A number that one thread writes and another reads."""

    value = NOTHING


class Host:
    """A server on its machine: reads jobs from its wire, and answers them."""

    def __init__(self, server: Server, fault: Fault | None = None) -> None:
        self._server, self._fault = server, fault or (lambda _: None)
        self._unwanted = Number()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    def run(self, address: tuple[str, int], secret: bytes, life: int) -> None:
        """Until the driver is gone, or wants it no longer."""
        with socket.create_connection(address, timeout=30) as end:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.sendall(HELLO.pack(secret, self._server.name.encode(), life, time.perf_counter()))
            threading.Thread(target=self._read, args=(Connection(end),), daemon=True).start()
            voice = Voice(Connection(end), self._fault)
            while (job := self._jobs.get()) is not None:
                befall(self._fault(type(job).__name__.lower()))
                with suppress(OSError):
                    answer(job, self._server, voice, SharedCancelFlag(self._unwanted, job.id))

    def _read(self, wire: Connection) -> None:
        receiver = Receiver()
        with suppress(EOFError, OSError):
            while True:
                for message in wire.receive():
                    if message[0] == CANCEL:
                        self._cancel(message[1])
                    else:
                        self._jobs.put(receiver.unpack(message))
        self._jobs.put(None)

    def _cancel(self, id: int) -> None:
        fate = self._fault(CANCEL)
        befall(fate)
        if fate != "lose":
            self._unwanted.value = id


class Voice(Connection):
    """A wire on which what is said may go wrong, for tests."""

    def __init__(self, wire: Connection, fault: Fault) -> None:
        super().__init__(wire._end)
        self._fault = fault

    def send(self, message: Any) -> None:
        fate = self._fault("answer")
        befall(fate)
        super().send(message)
        if fate == "twice":
            super().send(message)


@dataclass
class FaultInjector:
    """A fault for tests: now and then something goes wrong with one kind of message, and is written down."""

    kind: str
    fate: str
    every: int
    book: str
    count: int = 0

    def __call__(self, kind: str) -> str | None:
        self.count += kind == self.kind
        if kind != self.kind or self.count % self.every:
            return None
        with open(self.book, "a") as book:
            book.write(f"{self.kind} {self.fate}\n")
        return self.fate


def befall(fate: str | None) -> None:
    if fate == "die":
        os._exit(1)
    if fate == "hang":
        time.sleep(3600)
    if fate == "late":
        time.sleep(0.3)


class Actor(WorkerHandle):
    """A server in an actor, once it has called."""

    def __init__(self, server: Server, wire: Connection, handle: Any) -> None:
        super().__init__(server, wire)
        self._handle = handle
        self.since = time.perf_counter()  # of its last word, or of the job it was given

    def begin(self, job: Job) -> None:
        self.since = time.perf_counter()
        super().begin(job)

    def stop(self, id: int) -> None:
        with suppress(OSError):  # it is dead, which will be noticed
            self.wire.send((CANCEL, id))

    def dismiss(self) -> None:
        self.wire.close()
        discard(self._handle)


def discard(handle: Any) -> None:
    with suppress(Exception):  # it may be gone, and the cluster too
        ray().kill(handle)


@dataclass
class PendingConnection:
    """A connection that has not said who it is."""

    end: socket.socket
    came: float
    said: bytes = b""


@dataclass
class PendingActor:
    """A server that has been asked for."""

    handle: Any
    life: int
    asked: float


class RayFleet(RemoteFleet):
    """`address` joins a cluster; without it one is started here, and ends with the fleet.

    A server that has not answered for `hang_seconds` counts as dead, and one that has not come within
    `start_seconds` does not come. The servers call the driver: at `listen`, or any port of this machine, or
    where a gate between the machines has them call instead, `reach`.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        address: str | None = None,
        resources: Mapping[str, ResourceRequest] | None = None,
        restart: bool = True,
        hang_seconds: float = HANG_SECONDS,
        start_seconds: float = START_SECONDS,
        listen: tuple[str, int] | None = None,
        reach: tuple[str, int] | None = None,
        fault: Callable[[str], Fault] | None = None,
        log: list[Span] | None = None,
    ) -> None:
        check_seconds(hang=hang_seconds, start=start_seconds)
        super().__init__(servers, restart, log)
        self._resources, self._fault = dict(resources or {}), fault
        self._hang, self._patience = hang_seconds, start_seconds
        self._closed = False
        self._lives: dict[str, int] = {}
        self._coming: dict[str, PendingActor] = {}
        self._guests: list[PendingConnection] = []
        self._secret = secrets.token_bytes(32)
        self._cluster = Cluster(address, [self._resources_of(name) for name in self._servers])
        self._door = socket.create_server(listen or (self._cluster.here, 0))
        self._reach = reach or self._door.getsockname()[:2]
        self._selector.register(self._door, EVENT_READ, None)
        for name in self._servers:
            self._scheduler.remove(name, returns=True)
            self._ask_for(name)

    def _resources_of(self, name: str) -> ResourceRequest:
        return resources_of(self._resources, name, self._servers[name].role)

    def add(self, server: Server) -> None:
        """One more, which is used as soon as it has come."""
        if server.name in self._servers:
            raise ValueError(f"server {server.name!r} is already there")
        self._servers[server.name], self.usage[server.name] = server, ServerUsage(server.role)
        self._scheduler.expect(server.name, server.role)
        self._ask_for(server.name)

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Until all servers have come."""
        patience = self._patience if seconds is None else seconds
        wanted, end = list(self._coming), time.perf_counter() + patience
        while self._coming and time.perf_counter() < end:
            for key, _ in self._listen():
                self._hear_other(key)
        if late := [name for name in wanted if name not in self._workers]:
            raise ValueError(f"{', '.join(late)}: not there after {patience:g} s; {self._cluster.room()}")
        self._began = time.perf_counter()  # its clock starts when they can

    def _ask_for(self, name: str) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        handle = self._cluster.start(
            list(self._servers).index(name),
            self._servers[name],
            self._fault(name) if self._fault else None,
            self._resources_of(name),
        )
        handle.run.remote(self._reach, self._secret, life)
        self._coming[name] = PendingActor(handle, life, time.perf_counter())

    def _listen(self) -> list[tuple[SelectorKey, int]]:
        heard = self._selector.select(LOOK_SECONDS)
        now = time.perf_counter()
        for name in list(self._scheduler.working):
            if now - self._workers[name].since > self._hang:
                self.kill(name)
        for name, coming in list(self._coming.items()):
            if now - coming.asked > self._patience:
                self._give_up(name)
        for guest in [each for each in self._guests if now - each.came > SEND_SECONDS]:
            self._send_away(guest)
        return heard

    def _hear(self, name: str) -> None:
        self._workers[name].since = time.perf_counter()
        super()._hear(name)

    def _hear_other(self, key: SelectorKey) -> None:
        if key.fileobj is self._door:
            end, _ = self._door.accept()
            end.setblocking(False)
            self._guests.append(PendingConnection(end, time.perf_counter()))
            self._selector.register(end, EVENT_READ, None)
        for guest in [each for each in self._guests if each.end is key.fileobj]:
            self._hear_guest(guest)

    def _hear_guest(self, guest: PendingConnection) -> None:
        """Only who knows the secret is listened to any further."""
        try:
            guest.said += guest.end.recv(HELLO.size - len(guest.said)) or b"\0" * HELLO.size
        except OSError:
            self._send_away(guest)
            return
        if len(guest.said) < HELLO.size:
            return
        secret, padded, life, clock = HELLO.unpack(guest.said[: HELLO.size])
        name = padded.rstrip(b"\0").decode("utf-8", "replace")
        coming = self._coming.get(name)
        if not hmac.compare_digest(secret, self._secret) or coming is None or coming.life != life:
            self._send_away(guest)
            return
        self._leave_guests(guest)
        self._welcome(self._coming.pop(name), name, guest.end, clock)

    def _welcome(self, coming: PendingActor, name: str, end: socket.socket, clock: float) -> None:
        end.settimeout(SEND_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seat = Actor(self._servers[name], Connection(end), coming.handle)
        seat.ahead = time.perf_counter() - clock
        self._greet(seat)
        self._scheduler.add(name, self._servers[name].role)
        self._start_jobs()

    def _leave_guests(self, guest: PendingConnection) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.end)

    def _send_away(self, guest: PendingConnection) -> None:
        self._leave_guests(guest)
        guest.end.close()

    def _will_restart(self, name: str) -> bool:
        """A drafter that is on its way holds nobody up: the text goes on without it."""
        return self._scheduler.roles.get(name) == TARGET and self._comes_again(name)

    def _on_worker_death(self, name: str) -> None:
        again = self._comes_again(name)
        self._part(name)
        if again:
            self._ask_for(name)

    def _give_up(self, name: str) -> None:
        discard(self._coming.pop(name).handle)
        if name in self._scheduler.away:
            self._scheduler.give_up(name)
        self._events.extend(self._scheduler.stranded())

    def close(self) -> None:
        """Every server is gone: what is still open fails, and no actor is left."""
        if self._closed:
            return  # Ray would start again to hear that it should stop
        self._closed = True
        for name in list(self._coming):
            self._give_up(name)
        for guest in list(self._guests):
            self._send_away(guest)
        super().close()
        self._door.close()
        self._cluster.close()


def check_seconds(**limits: float) -> None:
    for name, seconds in limits.items():
        if not seconds > 0:
            raise ValueError(f"{name} seconds {seconds:g}: must be above 0")


def check_reachable(address: str) -> None:
    """Ray itself takes more than a minute to say so."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`, or the name of a cluster
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray at {address}: nobody answers there") from error


def hush() -> None:
    """Ray tells of every worker that dies, on standard output, where a text may be going."""
    with suppress(Exception):  # it has no other way to be told so, and this one may not last
        from ray._private import worker

        worker.print_to_stdstream = lambda *_, **__: None


class Cluster:
    """Ray, as much of it as we need: a group of places, and actors in them."""

    def __init__(self, address: str | None, resources: list[ResourceRequest]) -> None:
        self._ray, self._ours = ray(), False
        if not self._ray.is_initialized():
            self._join(address, resources)
        self.here = str(self._ray.util.get_node_ip_address())
        self._group = self._places(resources)

    def _join(self, address: str | None, resources: list[ResourceRequest]) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address is None:
            cpus = max(1, int(sum(each.cpus for each in resources) + 0.999))
            options |= {
                "address": "local",
                "num_cpus": max(cpus, os.cpu_count() or 1),
                "include_dashboard": False,
            }
        else:
            options["address"] = address
            check_reachable(address)
        try:
            self._ray.init(**options)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ValueError(f"ray at {address or 'this machine'}: cannot be reached ({first})") from error
        self._ours = True
        hush()

    def _places(self, resources: list[ResourceRequest]) -> Any:
        return self._ray.util.placement_group(
            [request.bundle or {"CPU": 0.001} for request in resources],
            strategy="SPREAD",
            bundle_label_selector=[dict(request.labels) for request in resources],
        )

    def start(self, place: int, server: Server, fault: Fault | None, need: ResourceRequest) -> Any:
        strategy: Any = "DEFAULT"
        if place < len(self._group.bundle_specs):
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place
            )
        host = self._ray.remote(Host).options(
            num_cpus=need.cpus, num_gpus=need.gpus, max_restarts=0, scheduling_strategy=strategy
        )
        return host.remote(server, fault)

    def room(self) -> str:
        """What the cluster has, for whoever asks too much of it."""
        found = self._ray.cluster_resources()
        return f"the cluster has {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs"

    def close(self) -> None:
        with suppress(Exception):
            self._ray.util.remove_placement_group(self._group)
        if self._ours:
            self._ray.shutdown()
