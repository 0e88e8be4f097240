"""`dsi serve` with the built-in pair, in a process of its own."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from command import ForkedProcess

LISTENING = re.compile(r"listening on (http://\S+)")
START_SECONDS = 60.0


@dataclass
class Live:
    """A running server and its log so far."""

    process: ForkedProcess
    log: list[str] = field(default_factory=list)
    url: str = ""

    def start(self) -> None:
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()
        end = time.monotonic() + START_SECONDS
        while not self.url:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {''.join(self.log)}")
            time.sleep(0.02)

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if address := LISTENING.search(line):
                self.url = address[1]

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    @property
    def children(self) -> list[int]:
        """The processes of its drafter and targets."""
        task = Path(f"/proc/{self.process.pid}/task")
        return [int(pid) for thread in task.iterdir() for pid in (thread / "children").read_text().split()]

    def workers(self, role: str) -> list[int]:
        """The processes of its servers whose names begin like this."""
        return [pid for pid in self.children if _process_name(pid).startswith(f"dsi {role}")]

    def stop(self) -> int:
        """Send SIGTERM; returns the exit status."""
        self.process.terminate()
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log_reader.join(10)
        self.process.stderr.close()


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # it is gone
        return ""


Serving = Callable[..., Live]


def start(*options: str, env: dict[str, str] | None = None) -> Live:
    live = Live(ForkedProcess(["serve", "--port", "0", *options], env or {}))
    try:
        live.start()
    except BaseException:
        live.kill()
        raise
    return live
