"""A fleet on a Ray cluster: each worker is an actor, placed where the cluster has the resources it asks for.

Ray places and starts the actors; jobs and events travel over a socket of each actor's own, in the encoding that
worker processes use. A worker that dies, hangs or loses its node is replaced; meanwhile its job runs elsewhere.
Workers die with the driver.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from selectors import EVENT_READ, SelectorKey
from types import SimpleNamespace
from typing import Any

from dsi.core.messages import Job
from dsi.core.stats import ServerUsage
from dsi.fleets.base import NOT_STARTED
from dsi.fleets.connection import Connection, JobDecoder
from dsi.fleets.remote import NO_JOB, SEND_SECONDS, RemoteFleet, SharedCancelFlag, WorkerHandle, run_job
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.models.process_utils import set_process_name
from dsi.models.protocol import computes_trees

HELLO = struct.Struct("!32s64sqd?")  # a secret, the server's name, its incarnation, its clock, if it computes trees
CANCEL = "cancel"
START_SECONDS = 120.0  # default


def ray() -> Any:
    """Import Ray; without it, say how to install it."""
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
        """Return the request as a bundle of a placement group."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, f"node:{self.node}" if self.node else "": 0.001}
        return {name: amount for name, amount in amounts.items() if name and amount > 0}


def parse_resources(text: str) -> ResourceRequest:
    """Parse `cpus=2,gpus=1,node=10.0.0.2,label=zone:a`, or some of it."""
    fields: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            if name in ("cpus", "gpus"):
                fields[name] = float(value)
            elif name == "node" and value:
                fields[name] = value
            elif name == "label" and ":" in value:
                key, _, label = value.partition(":")
                labels[key] = label
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"resources {part.strip()!r}: must be cpus=N, gpus=N, node=ADDRESS or label=KEY:VALUE"
            ) from None
    if min(fields.get("cpus", 1), fields.get("gpus", 0)) < 0:
        raise ValueError(f"resources {text!r}: must be at least 0")
    return ResourceRequest(**fields, labels=labels)


def resources_of(resources: Mapping[str, ResourceRequest], name: str, role: str) -> ResourceRequest:
    """Return the resources of a server: those given for its name, or else for its role."""
    return resources.get(name) or resources.get(role) or ResourceRequest()


class ActorWorker:
    """What runs in an actor: reads jobs from the driver's connection, runs them, and answers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._cancelled_id = SimpleNamespace(value=NO_JOB)  # one thread writes it, another reads it
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    def run(self, address: tuple[str, int], secret: bytes, incarnation: int) -> None:
        """Connect to the driver and run jobs until it closes the connection."""
        set_process_name(f"dsi {self._server.name}")
        name, trees = self._server.name.encode(), computes_trees(self._server.model)
        with socket.create_connection(address, timeout=30) as end:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.sendall(HELLO.pack(secret, name, incarnation, time.perf_counter(), trees))
            connection = Connection(end)
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()
            while (job := self._jobs.get()) is not None:
                with suppress(OSError):
                    self._run_job(job, connection)

    def _run_job(self, job: Job, connection: Connection) -> None:
        run_job(job, self._server, connection, SharedCancelFlag(self._cancelled_id, job.id))

    def _read(self, connection: Connection) -> None:
        decoder = JobDecoder()
        with suppress(EOFError, OSError):
            while True:
                for message in connection.receive():
                    if message[0] == CANCEL:
                        self._cancel(message[1])
                    else:
                        self._jobs.put(decoder.decode(message))
        self._jobs.put(None)

    def _cancel(self, id: int) -> None:
        self._cancelled_id.value = id


class ActorHandle(WorkerHandle):
    """A worker in an actor that has connected."""

    def __init__(self, server: Server, connection: Connection, actor: Any, computes_trees: bool) -> None:
        super().__init__(server, connection)
        self.actor, self.computes_trees = actor, computes_trees

    def cancel(self, id: int) -> None:
        with suppress(OSError):  # it is dead, which will be detected
            self.connection.send((CANCEL, id))

    def kill(self) -> None:
        self.connection.close()
        kill_actor(self.actor)


def kill_actor(actor: Any) -> None:
    with suppress(Exception):  # it may be gone, and the cluster too
        ray().kill(actor)


@dataclass
class PendingConnection:
    """An accepted connection that has not sent its whole hello yet."""

    socket: socket.socket
    accepted_at: float
    received: bytes = b""


@dataclass
class PendingActor:
    """An actor that was started and has not connected yet."""

    actor: Any
    run: Any  # what Ray returns for its method `run`
    incarnation: int
    started_at: float


class RayFleet(RemoteFleet):
    """`address` joins a cluster; without it one is started here, and ends with the fleet.

    A server that has not connected within `start_seconds` counts as dead, too. The actors connect to the driver: at
    `listen`, or any port of this machine, or, where there is a gateway between the machines, at `reach`. `worker` is
    the class that runs in an actor.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        address: str | None = None,
        resources: Mapping[str, ResourceRequest] | None = None,
        restart: bool = True,
        hang_seconds: float | None = None,
        start_seconds: float = START_SECONDS,
        listen: tuple[str, int] | None = None,
        reach: tuple[str, int] | None = None,
        worker: type[ActorWorker] = ActorWorker,
        log: list[Span] | None = None,
    ) -> None:
        super().__init__(servers, restart, hang_seconds, log)
        self._resources, self._worker_class = dict(resources or {}), worker
        self._start_seconds = start_seconds
        self._closed = False
        self._incarnations: dict[str, int] = {}
        self._pending_actors: dict[str, PendingActor] = {}
        self._pending_connections: list[PendingConnection] = []
        self._secret = secrets.token_bytes(32)
        self._cluster = RayCluster(address, [self._resources_of(name) for name in self._servers])
        self._listen_socket = socket.create_server(listen or (self._cluster.node_address, 0))
        self._reach = reach or self._listen_socket.getsockname()[:2]
        self._selector.register(self._listen_socket, EVENT_READ, None)
        for name in self._servers:
            self._scheduler.remove(name, restarts=True)
            self._start_actor(name)

    def _resources_of(self, name: str) -> ResourceRequest:
        return resources_of(self._resources, name, self._servers[name].role)

    def add(self, server: Server) -> None:
        """Add a server, which runs jobs as soon as its actor has connected."""
        if server.name in self._servers:
            raise ValueError(f"server {server.name!r} is already there")
        self._servers[server.name], self.usage[server.name] = server, ServerUsage(server.role)
        self._scheduler.expect(server.name, server.role)
        self._start_actor(server.name)

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Block until all actors have connected."""
        timeout = self._start_seconds if seconds is None else seconds
        expected, end = list(self._pending_actors), time.perf_counter() + timeout
        while time.perf_counter() < end and any(name not in self._workers for name in expected):
            self._wait_for_events()
        if late := [name for name in expected if name not in self._workers]:
            raise ValueError(f"{', '.join(late)}: not there after {timeout:g} s; {self._cluster.describe()}")
        self._clock_start = time.perf_counter()

    def computes_trees(self, role: str) -> bool:
        """Whether all servers of a role that have connected compute a tree of draft tokens in one forward."""
        workers = [worker for worker in self._workers.values() if worker.server.role == role]
        return bool(workers) and all(worker.computes_trees for worker in workers)

    def _start_actor(self, name: str) -> None:
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        bundle = list(self._servers).index(name)
        actor = self._cluster.start(self._worker_class, self._servers[name], self._resources_of(name), bundle)
        run = actor.run.remote(self._reach, self._secret, incarnation)
        self._pending_actors[name] = PendingActor(actor, run, incarnation, time.perf_counter())

    def _drop_overdue(self, elapsed: float) -> None:
        """Drop the actors that do not come and the connections that stay silent, too."""
        super()._drop_overdue(elapsed)
        now = time.perf_counter()
        for name, pending in list(self._pending_actors.items()):
            if self._cluster.has_ended(pending.run):
                self._on_not_started(name, "its actor ended before it connected")
            elif now - pending.started_at > self._start_seconds:
                self._on_not_started(name, f"not there after {self._start_seconds:g} s")
        for connection in list(self._pending_connections):
            if now - connection.accepted_at > SEND_SECONDS:
                self._reject(connection)

    def _on_other_socket(self, key: SelectorKey) -> None:
        if key.fileobj is self._listen_socket:
            accepted, _ = self._listen_socket.accept()
            accepted.setblocking(False)
            self._pending_connections.append(PendingConnection(accepted, time.perf_counter()))
            self._selector.register(accepted, EVENT_READ, None)
        for pending in [pending for pending in self._pending_connections if pending.socket is key.fileobj]:
            self._on_hello(pending)

    def _on_hello(self, pending: PendingConnection) -> None:
        """Read on in the hello; only an actor that knows the secret becomes a worker."""
        try:
            pending.received += pending.socket.recv(HELLO.size - len(pending.received)) or b"\0" * HELLO.size
        except OSError:
            self._reject(pending)
            return
        if len(pending.received) < HELLO.size:
            return
        secret, padded, incarnation, clock, trees = HELLO.unpack(pending.received[: HELLO.size])
        name = padded.rstrip(b"\0").decode("utf-8", "replace")
        actor = self._pending_actors.get(name)
        if not hmac.compare_digest(secret, self._secret) or actor is None or actor.incarnation != incarnation:
            self._reject(pending)
            return
        self._forget_pending(pending)
        self._accept(self._pending_actors.pop(name), name, pending.socket, clock, trees)

    def _accept(self, pending: PendingActor, name: str, accepted: socket.socket, clock: float, trees: bool) -> None:
        accepted.settimeout(SEND_SECONDS)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worker = ActorHandle(self._servers[name], Connection(accepted), pending.actor, trees)
        worker.clock_offset = time.perf_counter() - clock
        self._add_worker(worker)
        self._scheduler.add(name, self._servers[name].role)
        self._start_jobs()

    def _forget_pending(self, pending: PendingConnection) -> None:
        self._pending_connections.remove(pending)
        self._selector.unregister(pending.socket)

    def _reject(self, pending: PendingConnection) -> None:
        self._forget_pending(pending)
        pending.socket.close()

    def _replace_dead_worker(self, name: str) -> None:
        self._start_actor(name)

    def _on_not_started(self, name: str, detail: str) -> None:
        self._give_up(name, for_good=not self._restarts.enabled)
        self._restarts.on_death(name, time.perf_counter())
        self._count_death(name, NOT_STARTED)
        self._report(name, NOT_STARTED, detail)

    def _give_up(self, name: str, for_good: bool = True) -> None:
        """Stop waiting for an actor to connect; jobs go on waiting for a target that is tried again."""
        kill_actor(self._pending_actors.pop(name).actor)
        if for_good and name in self._scheduler.starting:
            self._scheduler.give_up(name)
        self._events.extend(self._scheduler.orphaned())

    def close(self) -> None:
        """Kill every actor; all open jobs fail."""
        if self._closed:
            return  # or Ray would start again in order to stop
        self._closed = True
        for name in list(self._pending_actors):
            self._give_up(name)
        for pending in list(self._pending_connections):
            self._reject(pending)
        super().close()
        self._listen_socket.close()
        self._cluster.close()


def check_reachable(address: str) -> None:
    """Fail at once where nobody listens at the address; Ray itself takes more than a minute to say so."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`, or the name of a cluster
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray at {address}: nobody answers there") from error


def silence_ray() -> None:
    """Keep Ray from reporting every dead worker on standard output, where a text may be going."""
    with suppress(Exception):  # a private function, which another version of Ray may not have
        from ray._private import worker

        worker.print_to_stdstream = lambda *_, **__: None


class RayCluster:
    """The part of Ray that a fleet uses: a placement group, and actors in it."""

    def __init__(self, address: str | None, resources: list[ResourceRequest]) -> None:
        self._ray, self._owned = ray(), False
        if not self._ray.is_initialized():
            self._connect(address, resources)
        self.node_address = str(self._ray.util.get_node_ip_address())
        self._group = self._ray.util.placement_group(
            [request.bundle or {"CPU": 0.001} for request in resources],
            strategy="SPREAD",
            bundle_label_selector=[dict(request.labels) for request in resources],
        )

    def _connect(self, address: str | None, resources: list[ResourceRequest]) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address is None:
            cpus = max(1, int(sum(request.cpus for request in resources) + 0.999))
            options |= {"address": "local", "num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        else:
            options["address"] = address
            check_reachable(address)
        try:
            self._ray.init(**options)
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ValueError(f"ray at {address or 'this machine'}: cannot be reached ({first_line})") from error
        self._owned = True
        silence_ray()

    def start(self, worker: type[ActorWorker], server: Server, resources: ResourceRequest, bundle: int) -> Any:
        """Start an actor in this bundle of the placement group; a server added later has none."""
        strategy: Any = "DEFAULT"
        if bundle < len(self._group.bundle_specs):
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
        actor_class = self._ray.remote(worker).options(
            num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=0, scheduling_strategy=strategy
        )
        return actor_class.remote(server)

    def has_ended(self, call: Any) -> bool:
        """Whether a method of an actor has returned, or its actor has died."""
        return bool(self._ray.wait([call], timeout=0, fetch_local=False)[0])

    def describe(self) -> str:
        """Say what the cluster has, for a message about what it lacks."""
        total = self._ray.cluster_resources()
        return f"the cluster has {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs"

    def close(self) -> None:
        with suppress(Exception):
            self._ray.util.remove_placement_group(self._group)
        if self._owned:
            self._ray.shutdown()
