"""`dsi generate` and `dsi chat`."""

import json
from pathlib import Path

import pytest

from command import document, dsi

pytestmark = pytest.mark.slow  # loads models


def test_generate_writes_text_alone_on_stdout() -> None:
    done = dsi("generate", "Once upon a time", "--max-new-tokens", "12")
    assert done.returncode == 0
    assert done.stdout.startswith(", there was a little")
    assert done.stderr.startswith("dsi: 12 tokens in ")
    assert len(done.stderr.splitlines()) == 1


def test_generate_reads_a_pipe_or_a_file_and_gives_figures(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Tom and his dog")
    piped = dsi("generate", "--max-new-tokens", 8, "--json", stdin="Tom and his dog")
    from_pipe = json.loads(piped.stdout.splitlines()[-1])
    from_file = document("generate", "--file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8")
    assert (from_pipe["text"], from_pipe["tokens"], from_pipe["label"]) == (from_file["text"], 8, "measured")


def test_generate_reports_the_decisions_of_auto() -> None:
    result = document("generate", "Once upon a time", "--algorithm", "auto", "--max-new-tokens", "12")
    assert result["text"].startswith(", there was a little")
    assert (result["algorithm"], result["decisions"][0]["cause"]) == ("auto", "start")
    assert result["overlap"]["rejections"] == len(result["overlap"]["losses"])


def test_chat_answers_each_line() -> None:
    done = dsi("chat", "--max-new-tokens", 8, stdin="Once upon a time\nThe cat was\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
