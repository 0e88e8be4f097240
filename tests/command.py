"""The command line as its users have it: a process of its own for each command.

To import torch and transformers takes seconds. So a process that has imported them, and has done nothing
else, is forked for each command (`multiprocessing`'s fork server). What a command imports by itself, and
when, is for `test_imports.py`.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

PRELOADED = [
    "dsi.cli.main",
    "dsi.engine.profile_cpu",
    "dsi.engine.build_cuda",
    "dsi.experiments.acceptance",
    "dsi.experiments.latency",
]


@cache
def server() -> ForkServerContext:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it is read when the hub's package is imported
    found = get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def run(arguments: list[str], folder: str, *files: Path) -> None:
    from dsi.cli.main import main

    os.chdir(folder)
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["dsi", *arguments]
    main()


def dsi(*arguments: object) -> CompletedProcess[str]:
    words = [str(each) for each in arguments]
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = server().Process(target=run, args=(words, str(Path.cwd()), out, err))
        process.start()
        process.join()
        assert process.exitcode is not None
        return CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def document(*arguments: object) -> dict[str, Any]:
    """The figures of a command that succeeds."""
    done = dsi(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
