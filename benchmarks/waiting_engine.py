"""An engine over HTTP that waits instead of computing: what speculation over a pool of servers costs beside its theory.

It speaks as `dsi serve` does: `/v1/verify` answers after one forward, however many positions it has, and
`/v1/completions` streams a token after each. The text of seed n is that of `ToyTarget(n)`. Every answer also waits for
the network, there and back; a request whose client disconnects ends at once.
`waiting_engine.py FORWARD_MS NETWORK_MS` serves until its standard input is closed.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from dsi.core.sequence import Tokens
from dsi.fleets.threads import on_time, timer_lateness
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget

MODELS = {"object": "list", "data": [{"id": "toy", "owned_by": "dsi", "max_model_len": 4096}]}
MS_PER_SECOND = 1000


class WaitingEngine(AbstractContextManager["WaitingEngine"]):
    """One in a process of its own."""

    def __init__(self, forward_ms: float, network_ms: float) -> None:
        command = [sys.executable, __file__, str(forward_ms), str(network_ms)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def url(self) -> str:
        """Waits until it listens."""
        if not hasattr(self, "_url"):
            self._url = self._process.stdout.readline().strip() if self._process.stdout else ""
        return self._url

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()


class Disconnected(Exception):
    pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that closes its connection has cancelled its request."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True
    forward, network = 0.0, 0.0  # seconds

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer(MODELS)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            if self.path == "/v1/verify":
                self._wait(self.forward + 2 * self.network)
                self._answer({"tokens": answer(body["seed"], body["prompt"], body["num_positions"]), "model": "toy"})
            else:
                self._stream(self._completion(body))
        except (Disconnected, OSError):
            self.close_connection = True

    def _wait(self, seconds: float) -> None:
        """Wait on time, unless the connection closes: `select` counts in microseconds."""
        if select.select([self.connection], [], [], on_time(seconds))[0]:
            raise Disconnected

    def _completion(self, body: dict[str, Any]) -> Iterator[bytes]:
        tokens = list(body["prompt"])
        self._wait(2 * self.network)
        for _ in range(body["max_tokens"]):
            self._wait(self.forward)
            tokens += answer(body["seed"], tokens, 1)
            choice = {"index": 0, "text": "", "token_ids": tokens[-1:]}
            yield json.dumps({"model": "toy", "choices": [choice]}).encode()
        yield b"[DONE]"

    def _stream(self, events: Iterator[bytes]) -> None:
        self._head({"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        for event in events:
            self._chunk(b"data: " + event + b"\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, document: object) -> None:
        content = json.dumps(document).encode()
        self._head({"content-type": "application/json", "content-length": str(len(content))})
        self.wfile.write(content)
        self.wfile.flush()

    def _head(self, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def answer(seed: int, tokens: list[int], num_positions: int) -> Tokens:
    return ToyTarget(seed).answer(ForwardRequest(tokens, len(tokens) + 1 - num_positions))


def main() -> None:
    Handler.forward, Handler.network = (float(ms) / MS_PER_SECOND for ms in sys.argv[1:3])
    timer_lateness()  # before anybody waits
    server = Server(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
