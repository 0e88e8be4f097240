"""The examples of docs/serving.md work as they stand, except for the server's address."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from live_server import Live

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
METRIC = re.compile(r"`([a-z][a-z0-9_]+)(?:\{[a-z,]+\})?`")


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", examples("py"))
def test_docs_official_client_example(live: Live, code: str) -> None:
    adapted = code.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run([sys.executable, "-c", adapted], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(", there was a little girl named Lily.")


@pytest.mark.parametrize(
    "command", [example for example in examples("sh") if example.startswith("curl") and "-d" in example]
)
def test_docs_curl_examples(live: Live, command: str) -> None:
    adapted = command.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run(["bash", "-c", adapted], capture_output=True, text=True, check=True, timeout=60)
    assert '"choices"' in done.stdout or '"tokens"' in done.stdout
    assert '"error"' not in done.stdout


def test_docs_verify_example_shows_the_answer(live: Live) -> None:
    [command] = [example for example in examples("sh") if "/v1/verify" in example]
    adapted = command.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run(["bash", "-c", adapted], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) in [json.loads(example) for example in examples("json")]


def test_docs_trace_example(live: Live, tmp_path: Path) -> None:
    [command] = [example for example in examples("sh") if "/v1/traces/" in example]
    answer = live.post("/v1/completions", prompt="Once upon a time", max_tokens=20, temperature=0).json()
    adapted = re.sub(r"cmpl-\w+", answer["id"], command.replace("http://127.0.0.1:8000", live.url))
    adapted = adapted.replace("dsi timeline", f"{sys.executable} -m dsi timeline")
    done = subprocess.run(["bash", "-c", adapted], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "auto: 20 tokens" in done.stdout
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_docs_describe_existing_metrics(live: Live) -> None:
    live.post("/v1/completions", prompt="Once upon a time", max_tokens=8, temperature=0)
    table = PAGE.read_text().partition("| metric (all begin")[2].partition("\n\n")[0]
    names = METRIC.findall("\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    given = live.get("/metrics").text
    assert len(names) > 15
    assert [name for name in names if f"# TYPE dsi:{name} " not in given] == []
