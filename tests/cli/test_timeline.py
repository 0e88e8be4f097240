"""`dsi timeline`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from command import document_here, dsi_here


def test_timeline_draws_in_the_terminal_and_writes_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "a.png", "a.json")]
    outs = [part for file in files for part in ("--out", str(file))]
    done = dsi_here("timeline", "--algorithm", "si,dsi", "--tokens", "8", *outs)
    assert done.returncode == 0
    assert "DSI: 8 tokens in" in done.stdout
    assert all(file.stat().st_size > 500 for file in files)
    assert "traceEvents" in json.loads(files[2].read_text())
    again = dsi_here("timeline", "--trace", outs[-1])
    assert again.stdout == done.stdout
    drawn = document_here("timeline", "--algorithm", "dsi", "--tokens", "8")
    assert (drawn["label"], len(drawn["runs"][0]["times_ms"])) == ("simulated", 8)


def test_timeline_draws_in_a_narrow_terminal() -> None:
    environment = {**os.environ, "COLUMNS": "10"}
    command = [sys.executable, "-m", "dsi", "timeline", "--tokens", "4", "--algorithm", "dsi"]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
