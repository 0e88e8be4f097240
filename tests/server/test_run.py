"""Starting the server: API keys, sockets, limits, logs, and mistakes on the command line."""

import json
import logging
import socket
from pathlib import Path

import pytest

from command import dsi_here
from dsi.server.auth import KEYS_VARIABLE, read_keys
from dsi.server.limits import Limits
from dsi.server.run import LogFormatter
from dsi.server.sockets import is_loopback, listen


def test_read_keys_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert read_keys(None) == []
    monkeypatch.setenv(KEYS_VARIABLE, " one, two ,,")
    assert read_keys(None) == ["one", "two"]
    path = tmp_path / "keys"
    path.write_text("# mine\nthree\n\n  # indented\n four \n\t#five\n")
    assert read_keys(path) == ["three", "four"]


@pytest.mark.parametrize("content", [b"", b"# none\n", b"\xff\xfe"])
def test_read_keys_refuses_a_file_without_keys(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="keys: "):
        read_keys(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_listen_binds_or_says_why_not() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert is_loopback(listener)
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}: cannot listen there"):
            listen("127.0.0.1", port)
    with pytest.raises(ValueError, match="port 70000"):
        listen("127.0.0.1", 70000)
    with listen("0.0.0.0", 0) as listener:
        assert not is_loopback(listener)


@pytest.mark.parametrize("bad", [{"running": 0}, {"waiting": -1}, {"per_key": 0}, {"seconds": float("nan")}])
def test_limits_refuse_impossible_values(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Limits(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "texts"),
    [
        (Limits(), 64),
        (Limits(running=1, waiting=1), 2),
        (Limits(per_key=8), 8),
        (Limits(per_key=8, choices=4), 4),
        (Limits(running=2, waiting=1, per_key=9), 3),
    ],
)
def test_limits_allow_no_request_that_could_never_be_queued(limits: Limits, texts: int) -> None:
    assert limits.texts == texts


def test_log_formatter_writes_json() -> None:
    record = logging.makeLogRecord({"msg": "answered", "levelname": "INFO", "status": 200, "request": "a\nb"})
    document = json.loads(LogFormatter().format(record))
    assert (document["event"], document["status"], document["request"]) == ("answered", 200, "a\nb")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-running", "0"], "running 0: must be at least 1"),
        (["--cors-origin", "example.org"], "cors-origin 'example.org': must be a scheme and a host"),
        (["--cors-origin", "https://example.org/path"], "must be a scheme and a host"),
        (["--api-key-file", "/nowhere"], "/nowhere: cannot be read"),
        (["--target", "/nowhere"], "/nowhere: there is no such model folder"),
        (["--algorithm", "magic"], "algorithm 'magic'"),
    ],
)
def test_serve_reports_a_mistake_in_one_sentence(options: list[str], words: str) -> None:
    done = dsi_here("serve", "--port", 0, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_reports_a_port_in_use_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = dsi_here("serve", "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert "cannot listen there (address already in use)" in done.stderr
