"""`dsi generate` and `dsi chat`."""

import json
import re
from pathlib import Path

import pytest

from command import document, dsi

pytestmark = pytest.mark.slow  # loads models


def test_generate_writes_text_alone_on_stdout() -> None:
    done = dsi("generate", "Once upon a time", "--max-new-tokens", "12", "--algorithm", "dsi")
    assert done.returncode == 0
    assert done.stdout.startswith(", there was a little")
    assert done.stderr.startswith("dsi: 12 tokens in ")
    assert re.fullmatch(
        r"dsi: lookahead \d+ \(Eq\. \(1\): target [\d.]+ ms, drafter [\d.]+ ms, SP 1\), "
        r"min draft \d+ \(the fastest in simulation\)",
        done.stderr.splitlines()[1],
    )
    assert len(done.stderr.splitlines()) == 2  # nothing about how the built-in pair was loaded


def test_generate_reads_a_pipe_or_a_file_and_gives_figures(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Tom and his dog")
    piped = dsi("generate", "--max-new-tokens", 8, "--json", stdin="Tom and his dog")
    from_pipe = json.loads(piped.stdout.splitlines()[-1])
    from_file = document("generate", "--file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8")
    assert (from_pipe["text"], from_pipe["tokens"], from_pipe["label"]) == (from_file["text"], 8, "measured")
    assert from_pipe["token_ids"] == from_file["token_ids"]
    assert (len(from_pipe["token_ids"]), len(from_pipe["prompt_token_ids"])) == (8, from_pipe["prompt_tokens"])
    memory = from_pipe["memory_mib"]
    assert memory["processes"] == 3
    assert 0 < memory["shared"] < memory["total"]


def test_generate_reports_the_decisions_of_auto() -> None:
    result = document("generate", "Once upon a time", "--algorithm", "auto", "--max-new-tokens", "12")
    assert result["text"].startswith(", there was a little")
    assert (result["algorithm"], result["decisions"][0]["cause"]) == ("auto", "start")
    assert result["overlap"]["rejections"] == len(result["overlap"]["losses"])
    assert result["configuration"].startswith("auto: ended in ")


def test_chat_answers_each_line() -> None:
    done = dsi("chat", "--max-new-tokens", 8, stdin="Once upon a time\nThe cat was\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_chat_gives_a_document_for_each_answer() -> None:
    done = dsi("chat", "--max-new-tokens", 8, "--json", stdin="Once upon a time\nThe cat was\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(answer["token_ids"]) for answer in answers] == [8, 8]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"]  # the conversation so far
