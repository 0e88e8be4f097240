"""Commands as users run them: in a process of their own, or in this one where nothing is loaded or started.

Importing torch and transformers takes seconds. So `dsi` forks a process that has imported them and done nothing
else (`multiprocessing`'s fork server). What a command imports by itself, and when, is for `test_imports.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

PRELOADED = [
    "dsi.cli.main",
    "dsi.engine.profile_cpu",
    "dsi.engine.build_cuda",
    "dsi.experiments.acceptance",
    "dsi.experiments.latency",
    "dsi.server.run",
]


@cache
def server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _redirected(target: Callable[[list[str]], None], words: list[str], folder: str, *files: Path) -> None:
    os.chdir(folder)
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = files[0].open()  # multiprocessing has closed the one there was
    target(words)


def _forked(target: Callable[[list[str]], None], words: list[str], stdin: str) -> CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(stdin)
        process = server().Process(target=_redirected, args=(target, words, str(Path.cwd()), *files))
        process.start()
        process.join()
        assert process.exitcode is not None
        return CompletedProcess(words, process.exitcode, files[1].read_text(), files[2].read_text())


def _main(words: list[str]) -> None:
    from dsi.cli.main import main

    main(words)


def _exec(words: list[str]) -> None:
    code, *sys.argv[1:] = words
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def dsi(*arguments: object, stdin: str = "") -> CompletedProcess[str]:
    """Run a command in a forked process."""
    return _forked(_main, [str(word) for word in arguments], stdin)


def python(code: str, *arguments: str, stdin: str = "") -> CompletedProcess[str]:
    """Run Python code in a forked process, as `python -c` would."""
    return _forked(_exec, [code, *arguments], stdin)


def _background(words: list[str], env: dict[str, str], stderr: str) -> None:
    os.setsid()
    os.environ.update(env)
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    _main(words)


class ForkedProcess:
    """A command that runs in the background, in a forked process, with the interface of `subprocess.Popen`."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        with TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "stderr")
            os.mkfifo(pipe)
            self._process = server().Process(target=_background, args=(words, env, pipe))
            self._process.start()
            self.stderr = open(pipe)  # noqa: SIM115  # which waits until the other end is open
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("dsi", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def dsi_here(*arguments: object) -> CompletedProcess[str]:
    """Run a command in this process: much faster, for those that start no processes and for mistakes."""
    from dsi.cli.main import main

    words = [str(word) for word in arguments]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            main(words)
            code: Any = 0
        except SystemExit as exit:
            code = exit.code
    return CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())


def refused(*arguments: object) -> str:
    """The sentence that a mistake gets, without `dsi: ` and the end of the line."""
    done = dsi_here(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("dsi: ")
    return line.removeprefix("dsi: ")


def document(*arguments: object) -> dict[str, Any]:
    """The JSON document of a command that succeeds in a forked process."""
    return _document(dsi(*arguments, "--json"))


def document_here(*arguments: object) -> dict[str, Any]:
    """The JSON document of a command that succeeds in this process."""
    return _document(dsi_here(*arguments, "--json"))


def _document(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document
