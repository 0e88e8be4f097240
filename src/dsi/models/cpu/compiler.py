"""Compiles the C kernels for this machine's processor at their first use, and loads them.

No torch is imported here: compiling starts while torch is being imported.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from dsi.models.host import cache_folder, processor_features, processor_name

SOURCE = Path(str(files("dsi.models.cpu"))) / "kernels.c"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-pthread")
COMPILE_SECONDS = 120.0


class KernelsUnavailable(Exception):
    """There are no compiled kernels here; the message says why."""


def compiler() -> str | None:
    """The C compiler: that of the environment, or cc, gcc or clang."""
    names = (os.environ.get("CC") or "", "cc", "gcc", "clang")
    return next((path for path in map(shutil.which, filter(None, names)) if path), None)


def library_path() -> Path:
    """Where the kernels of this source are kept for this processor and compiler."""
    program = compiler() or ""
    version = os.stat(os.path.realpath(program)).st_mtime_ns if program else 0
    parts = (SOURCE.read_bytes(), FLAGS, program, version, processor_name(), processor_features())
    return cache_folder() / f"kernels-{sha256(repr(parts).encode()).hexdigest()[:16]}.so"


@dataclass(frozen=True)
class Compilation:
    """A compiler at work on the kernels, in a process of its own."""

    program: str
    process: subprocess.Popen[bytes]
    unfinished: str
    path: Path

    @classmethod
    def start(cls, path: Path) -> Compilation:
        """Compile into a new file, so that no other process loads half of one."""
        if (program := compiler()) is None:
            raise KernelsUnavailable("there is no C compiler (cc, gcc or clang)")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
            os.close(descriptor)
        except OSError as error:
            raise KernelsUnavailable(f"{path.parent} cannot be written ({error.strerror})") from error
        command = [program, *FLAGS, "-o", unfinished, str(SOURCE), "-lm"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return cls(program, process, unfinished, path)

    def finish(self) -> None:
        """Wait for the compiler, and rename its file to what it is to be."""
        try:
            _, output = self.process.communicate(timeout=COMPILE_SECONDS)
            if self.process.returncode:
                first = [*output.decode(errors="replace").strip().splitlines(), f"status {self.process.returncode}"][0]
                raise KernelsUnavailable(f"{self.program} cannot compile them ({first})")
            os.replace(self.unfinished, self.path)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.process.kill()
            raise KernelsUnavailable(f"they cannot be compiled ({error})") from error
        finally:
            with suppress(OSError):
                os.unlink(self.unfinished)


Signature = tuple[Any, tuple[Any, ...]]
_compiling: list[Compilation] = []  # in the background, one at most
SIGNATURES: dict[str, Signature] = {}  # result and arguments of each kernel, by its name


def declare(name: str, result: Any, *arguments: Any) -> None:
    """Declare a kernel, which need not be compiled yet."""
    SIGNATURES[name] = result, arguments


@cache
def kernel(name: str) -> Callable[..., Any]:
    """Return a declared kernel."""
    function: Any = load_kernels()[name]
    function.restype, function.argtypes = SIGNATURES[name]
    return function  # type: ignore[no-any-return]


def start_compiling() -> None:
    """Compile the kernels in the background unless they are kept from an earlier run; `load_kernels` waits for it."""
    if not _compiling and not library_path().exists():
        with suppress(KernelsUnavailable):  # which `load_kernels` reports
            _compiling.append(Compilation.start(library_path()))


@cache
def load_kernels() -> ctypes.CDLL:
    """Load the kernels, compiled now unless they are kept from an earlier run."""
    path = library_path()
    if _compiling:
        _compiling.pop().finish()
    if not path.exists():
        Compilation.start(path).finish()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded ({error})") from error


@cache
def why_unavailable() -> str:
    """Why there are no compiled kernels; empty where there are."""
    try:
        load_kernels()
    except KernelsUnavailable as error:
        return str(error)
    return ""
