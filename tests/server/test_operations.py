"""What operators and other tools expect beside OpenAI's API: counts by route, tokenizing, CORS, and few open files."""

import json
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from attackers import check_refused, connect, head, read_response, until
from command import python
from live_server import Live, Serving, start

pytestmark = pytest.mark.slow

STORY = "Once upon a time"
ORIGIN, KEY = "https://app.example.org", "a-secret-of-this-test"


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    """A server with a key, for pages of one origin."""
    options = ("--cors-origin", ORIGIN + "/", "--cors-origin", "http://localhost:3000", "--max-per-key", "3")
    server = start(*options, env={"DSI_API_KEYS": KEY})
    yield server
    server.kill()


def http_counts(live: Live) -> dict[str, float]:
    """HTTP requests by their labels."""
    lines = [line for line in live.get("/metrics").text.splitlines() if line.startswith("dsi:http_requests_total{")]
    return {line.partition("{")[2].rpartition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_count_http_requests_by_route_and_status(live: Live) -> None:
    before = http_counts(live)
    live.post("/v1/completions", prompt="a", max_tokens=1)
    live.post("/v1/completions", prompt=[])
    live.get("/v1/models/one")
    live.get("/v1/models/two/three")
    live.get("/nowhere/1")
    live.get("/nowhere/2")
    live.get("/v1/completions")
    httpx.request("BREW", live.url + "/health")
    after = http_counts(live)
    new = {labels: count - before.get(labels, 0) for labels, count in after.items() if count != before.get(labels, 0)}
    assert new == {
        'method="GET",route="/metrics",status="200"': 1,
        'method="POST",route="/v1/completions",status="200"': 1,
        'method="POST",route="/v1/completions",status="400"': 1,
        'method="GET",route="/v1/models/{model}",status="404"': 2,
        'method="GET",route="other",status="404"': 2,
        'method="GET",route="/v1/completions",status="405"': 1,
        'method="other",route="/health",status="405"': 1,
    }


def test_metrics_describe_queue_and_process(live: Live) -> None:
    before = live.metric("dsi:request_queue_time_seconds_count")
    live.post("/v1/completions", prompt="a", n=3, max_tokens=1)
    assert live.metric("dsi:request_queue_time_seconds_count") == before + 3
    assert live.metric("process_open_fds") > 3
    assert live.metric("process_resident_memory_bytes") > 1 << 20
    assert live.metric("python_info") == 1


def test_tokenize_counts_as_a_completion_does(live: Live) -> None:
    done = live.post("/tokenize", prompt=STORY, return_token_strs=True).json()
    scored = live.post("/v1/completions", prompt=STORY, max_tokens=0, echo=True).json()
    assert done["count"] == len(done["tokens"]) == len(done["token_strs"]) == scored["usage"]["prompt_tokens"]
    assert done["max_model_len"] == live.get("/v1/models").json()["data"][0]["max_model_len"]
    bare = live.post("/tokenize", prompt=STORY, add_special_tokens=False, model="builtin").json()
    assert bare["tokens"] == done["tokens"][-bare["count"] :]
    assert bare["token_strs"] is None
    assert live.post("/detokenize", tokens=bare["tokens"]).json() == {"prompt": STORY}
    assert live.post("/tokenize", prompt="", add_special_tokens=False).json()["tokens"] == []
    assert live.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokenize_counts_as_a_chat_does(live: Live) -> None:
    messages = [{"role": "user", "content": STORY}]
    done = live.post("/tokenize", messages=messages, add_generation_prompt=True).json()
    chat = live.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert done["count"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "must have either prompt or messages"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            400,
            "either prompt or messages",
        ),
        ("/tokenize", {"prompt": 1}, 400, "prompt: "),
        ("/tokenize", {"prompt": "\ud800"}, 400, "the prompt is no text that can be read"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "the model 'other' is not here"),
        ("/detokenize", {"tokens": [1, 1 << 20]}, 400, "token 1048576: the model knows "),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_tokenize_refuses_a_mistake_in_a_sentence(
    live: Live, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(live.url + path, content=json.dumps(body), headers=headers, timeout=30)
    assert words in check_refused(answer, status)["message"]


def test_openapi_names_the_bearer_scheme_where_keys_are_needed(live: Live, shared: Live) -> None:
    document = shared.get("/openapi.json").json()
    [(name, scheme)] = document["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    secured = {
        path
        for path, methods in document["paths"].items()
        for one in methods.values()
        if one.get("security") == [{name: []}]
    }
    assert secured == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/verify",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/traces/{id}",
        "/tokenize",
        "/detokenize",
    }
    for path in ("/tokenize", "/detokenize"):
        check_refused(shared.post(path, prompt="a", tokens=[]), 401)
    assert "securitySchemes" not in live.get("/openapi.json").json()["components"]


def test_key_with_too_many_texts_is_refused_by_its_own_limit(shared: Live) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "temperature": 100, "stream": True}
    request: dict[str, Any] = {"url": shared.url + "/v1/completions", "headers": bearer(KEY), "timeout": 30}
    with ExitStack() as stack:
        for _ in range(3):
            assert stack.enter_context(httpx.stream("POST", json=body, **request)).status_code == 200
        error = check_refused(httpx.post(json=body, **request), 429)
        assert error["message"].startswith("3 texts of at most 3 are being written or wait for their turn")
    refused = httpx.post(json={"prompt": "a", "n": 4}, **request)
    assert "at most 3 texts" in check_refused(refused, 400)["message"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# Pages of other origins.


def test_preflight_allows_a_configured_origin_and_its_key(shared: Live) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = httpx.options(shared.url + "/v1/completions", headers={"origin": ORIGIN, **asked})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-request-id"]
    refused = httpx.options(shared.url + "/v1/completions", headers={"origin": "https://elsewhere.example", **asked})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_response_is_shown_to_a_configured_origin_only(shared: Live) -> None:
    for headers, status in ((bearer(KEY), 200), ({}, 401)):
        for origin in (ORIGIN, "http://localhost:3000"):
            answer = httpx.get(shared.url + "/v1/models", headers={"origin": origin, **headers})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            # Only what is embedded without CORS is subject to it.
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        other = httpx.get(shared.url + "/v1/models", headers={"origin": "https://elsewhere.example", **headers})
        assert "access-control-allow-origin" not in other.headers


def test_host_is_checked_before_the_origin(shared: Live) -> None:
    with connect(shared.url) as connection:
        request = head("OPTIONS /v1/models", f"Origin: {ORIGIN}", "Access-Control-Request-Method: GET")
        connection.sendall(request.replace(b"Host: localhost", b"Host: elsewhere.example"))
        answer = read_response(connection)
    check_refused(answer, 400)
    assert "access-control-allow-origin" not in answer.headers


# Open files.


def test_server_without_files_logs_a_refusal_and_goes_on(serving: Serving) -> None:
    server = serving("--sp", "1")
    pid = server.process.pid
    body = {"prompt": "Once", "max_tokens": 400, "temperature": 100, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream, ExitStack() as stack:
        lines = stream.iter_lines()
        next(lines)
        room = len(list(Path(f"/proc/{pid}/fd").iterdir())) + 4
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, room))
        for _ in range(32):
            stack.enter_context(connect(server.url))
        assert until(lambda: any("connections are refused" in line for line in server.log))
        assert "[DONE]" in [line.removeprefix("data: ") for line in lines]
    assert until(lambda: answers(server))
    documents = [json.loads(line) for line in server.log if line.strip() and not line.startswith("dsi: ")]
    [refusal] = [document for document in documents if "connections are refused" in document["event"]]
    assert (refusal["level"], refusal["why"]) == ("error", "Too many open files")
    assert all(document["level"] in ("info", "error") for document in documents)


def answers(server: Live) -> bool:
    try:
        return httpx.get(server.url + "/version", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


FILE_LIMITS = """
import logging, resource, sys
from dsi.server.run import configure_logging
from dsi.server.sockets import raise_file_limit
configure_logging()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
raise_file_limit(100)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
logging.getLogger("asyncio").error("odd", exc_info=ValueError("a\\nb"))
logging.getLogger("transformers").warning("long")
__import__("warnings").warn("old")
"""


def test_file_limit_is_raised_as_far_as_it_goes() -> None:
    enough, few = python(FILE_LIMITS, "1000"), python(FILE_LIMITS, "200")
    assert (enough.stdout, few.stdout) == ("484 1000\n", "200 200\n")
    warning, *others = [json.loads(line) for line in few.stderr.splitlines()]
    assert (warning["level"], warning["connections"], warning["files"], warning["needed"]) == ("warning", 100, 200, 484)
    assert [json.loads(line)["level"] for line in enough.stderr.splitlines()] == ["error", "warning", "warning"]
    assert others[0]["exception"].endswith("ValueError: a\nb")
