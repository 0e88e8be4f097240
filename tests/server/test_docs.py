"""What docs/serving.md shows works as it stands, but for where the server listens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from live_server import Live

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
METRIC = re.compile(r"`([a-z][a-z0-9_]+)(?:\{[a-z,]+\})?`")


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", examples("py"))
def test_the_official_client_as_shown(live: Live, code: str) -> None:
    here = code.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(", there was a little girl named Lily.")


@pytest.mark.parametrize("command", [each for each in examples("sh") if each.startswith("curl") and "-d" in each])
def test_curl_as_shown(live: Live, command: str) -> None:
    here = command.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, check=True, timeout=60)
    assert '"choices"' in done.stdout
    assert '"error"' not in done.stdout


def test_a_trace_is_drawn_as_shown(live: Live, tmp_path: Path) -> None:
    [command] = [each for each in examples("sh") if "/v1/traces/" in each]
    answer = live.post("/v1/completions", prompt="Once upon a time", max_tokens=20, temperature=0).json()
    here = re.sub(r"cmpl-\w+", answer["id"], command.replace("http://127.0.0.1:8000", live.url))
    here = here.replace("dsi timeline", f"{sys.executable} -m dsi timeline")
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "DSI: 20 tokens" in done.stdout
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_every_metric_that_is_described_is_there(live: Live) -> None:
    live.post("/v1/completions", prompt="Once upon a time", max_tokens=8, temperature=0)
    table = PAGE.read_text().partition("| metric (all begin")[2].partition("\n\n")[0]
    names = METRIC.findall("\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    given = live.get("/metrics").text
    assert len(names) > 15
    assert [name for name in names if f"# TYPE dsi:{name} " not in given] == []
