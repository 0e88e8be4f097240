"""A stand-in for an inference engine: answers over HTTP as vLLM, SGLang, llama.cpp and `dsi serve` do, with faults."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Event, Thread
from typing import Any

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.protocol import ForwardRequest, Model
from dsi.models.tokenizer import Tokenizer

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "dsi": "dsi"}
FAULTS = ("close", "status 500", "status 429", "half a body", "wrong JSON", "wrong number", "another model", "slow")

Fault = Callable[[str], str | None]  # which fault strikes a request for this path, if any


class Closed(Exception):
    """The connection is to be closed without an answer."""


@dataclass
class StandInEngine:
    """`with StandInEngine("vllm", model) as engine:` answers at `engine.url`."""

    kind: str
    model: Model
    name: str = "toy"
    tokenizer: Tokenizer | None = None
    fault: Fault = lambda _: None
    slow_seconds: float = 5.0
    context: int = 4096
    api_key: str | None = None
    port: int = 0
    requests: list[tuple[str, Any]] = field(default_factory=list)  # paths and bodies
    num_connections: int = 0  # so far
    num_cancelled: int = 0  # streams whose client went away

    def start(self) -> StandInEngine:
        engine = self
        self._connections: set[socket.socket] = set()
        self._stopped = Event()

        class Handler(EngineHandler):
            stand_in = engine

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Die: close every connection, and refuse new ones."""
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> StandInEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def models(self) -> dict[str, Any]:
        entry = {"id": self.name, "owned_by": OWNERS[self.kind], "root": self.name, "created": time.time()}
        if self.kind == "llama.cpp":
            entry["meta"] = {"n_vocab": self.tokenizer.size if self.tokenizer else 64, "n_ctx_train": self.context}
        else:
            entry["max_model_len"] = self.context
        return {"object": "list", "data": [entry]}

    def answer(self, tokens: Sequence[int], num_positions: int, sampling: Sampling = Sampling()) -> Tokens:  # noqa: B008
        request = ForwardRequest(tokens, len(tokens) + 1 - num_positions, len(tokens), sampling, self._stopped)
        return self.model.answer(request)

    def generate(self, tokens: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
        text = list(tokens)
        for _ in range(count):
            text += self.answer(text, 1, sampling)
            yield text[-1]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that closes its connection has cancelled its request."""


class EngineHandler(BaseHTTPRequestHandler):
    stand_in: StandInEngine
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.stand_in._connections.add(self.connection)
        self.stand_in.num_connections += 1

    def finish(self) -> None:
        self.stand_in._connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        with self._faults() as fault:
            if fault is None:
                answer = {"/v1/models": self.stand_in.models, "/props": self._properties}.get(self.path)
                self._json(200, answer()) if answer else self._json(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.stand_in.requests.append((self.path, body))
        with self._faults() as fault:
            if fault is not None:
                return
            paths = {
                "/v1/completions": self._completions,
                "/v1/verify": self._verify,
                "/completion": self._completion,
                "/generate": self._generate,
                "/tokenize": self._tokenize,
                "/detokenize": self._detokenize,
            }
            if self._is_known(body):
                paths[self.path](body)

    def _is_known(self, body: Mapping[str, Any]) -> bool:
        """As vLLM and `dsi serve`: a wrong key and another model are refused."""
        key = self.stand_in.api_key
        if key is not None and self.headers.get("authorization") != f"Bearer {key}":
            self._json(401, {"error": {"message": "wrong key"}})
        elif body.get("model", self.stand_in.name) != self.stand_in.name:
            self._json(404, {"error": {"message": f"the model {body['model']} does not exist"}})
        else:
            return True
        return False

    @contextmanager
    def _faults(self) -> Iterator[str | None]:
        """Inject a fault instead of an answer, or into it."""
        self._fault = fault = self.stand_in.fault(self.path)
        try:
            if fault == "close":
                raise Closed
            if fault == "slow":
                self.stand_in._stopped.wait(self.stand_in.slow_seconds)
                raise Closed
            if fault == "status 500":
                self._json(500, {"error": {"message": "a bug"}})
            elif fault == "status 429":
                self._json(429, {"error": {"message": "too many"}}, {"retry-after": "0.01"})
            elif fault == "wrong JSON":
                self._send(200, b'{"choices": [{"index": 0, "token_ids"')
            yield fault if fault in ("status 500", "status 429", "wrong JSON") else None
        except (Closed, OSError):
            self.close_connection = True
        except Exception as error:  # of the model
            self._json(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        return [*tokens, 2] if self._fault == "wrong number" else list(tokens)

    @property
    def _name(self) -> str:
        return "another" if self._fault == "another model" else self.stand_in.name

    def _json(self, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        if self._fault == "half a body":
            self._send(status, body, headers, len(body) // 2)
            raise Closed
        self._send(status, body, headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, end: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:end])
        self.wfile.flush()

    def _stream(self, chunks: Iterator[Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for chunk in chunks:
                self._chunk(f"data: {json.dumps(chunk)}\n\n".encode())
                if self._fault == "half a body":
                    raise Closed
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.stand_in.num_cancelled += 1
            raise

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    # vLLM and `dsi serve`.

    def _completions(self, body: Mapping[str, Any]) -> None:
        sampling = sampling_of(body)
        if body.get("stream"):
            generated = self.stand_in.generate(body["prompt"], body["max_tokens"], sampling)
            self._stream(self._completion_of(0, [token]) for token in generated)
            return
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        assert all(a == b[:-1] for a, b in pairwise(prompts))
        tokens = self._tokens(self.stand_in.answer(prompts[-1], len(prompts), sampling))
        choices = [self._completion_of(i, [token])["choices"][0] for i, token in enumerate(tokens)]
        self._json(200, {"model": self._name, "choices": choices[::-1]})  # in any order

    def _completion_of(self, index: int, tokens: Sequence[int]) -> dict[str, Any]:
        return {"model": self._name, "choices": [{"index": index, "text": "", "token_ids": list(tokens)}]}

    def _verify(self, body: Mapping[str, Any]) -> None:
        tokens = self.stand_in.answer(body["prompt"], body["num_positions"], sampling_of(body))
        self._json(200, {"tokens": self._tokens(tokens), "model": self._name})

    # llama.cpp.

    def _completion(self, body: Mapping[str, Any]) -> None:
        assert body["temperature"] == 0
        if body.get("stream"):
            generated = self.stand_in.generate(body["prompt"], body["n_predict"], Sampling())
            self._stream({"tokens": [token], "tokens_predicted": i} for i, token in enumerate(generated, 1))
            return
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        tokens = self._tokens(self.stand_in.answer(prompts[-1], len(prompts)))
        results = [{"index": i, "tokens": [token]} for i, token in enumerate(tokens)]
        self._json(200, results if len(results) > 1 else results[0])

    def _properties(self) -> dict[str, Any]:
        return {"default_generation_settings": {"n_ctx": self.stand_in.context}, "model_path": self.stand_in.name}

    # SGLang.

    def _generate(self, body: Mapping[str, Any]) -> None:
        parameters, tokens = body["sampling_params"], body["input_ids"]
        assert parameters["temperature"] == 0
        if body.get("stream"):
            received: list[int] = []
            self._stream(
                {"output_ids": received, "meta_info": {"completion_tokens": len(received)}}
                for token in self.stand_in.generate(tokens, parameters["max_new_tokens"], Sampling())
                if received.append(token) is None  # type: ignore[func-returns-value]
            )
            return
        start = body.get("logprob_start_len", len(tokens) - 1)
        *places, last = self.stand_in.answer(tokens, len(tokens) - start)
        logprobs = [None, *([[-0.5, token, None]] for token in places)]
        meta = {"completion_tokens": 1, "input_top_logprobs": logprobs}
        self._json(200, {"output_ids": self._tokens([last]), "meta_info": meta})

    # Tokenizers.

    def _tokenize(self, body: Mapping[str, Any]) -> None:
        assert self.stand_in.tokenizer is not None
        text, special = body.get("prompt", body.get("content")), body.get("add_special_tokens", body.get("add_special"))
        self._json(200, {"tokens": list(self.stand_in.tokenizer.encode(text, special))})

    def _detokenize(self, body: Mapping[str, Any]) -> None:
        assert self.stand_in.tokenizer is not None
        text = self.stand_in.tokenizer.decode(body["tokens"])
        self._json(200, {"content" if self.stand_in.kind == "llama.cpp" else "prompt": text})


def sampling_of(body: Mapping[str, Any]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    return Sampling(**{name: body[name] for name in names if name in body})
