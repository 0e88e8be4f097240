import gc
import os
import tempfile
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from dsi.core.messages import DRAFTER, TARGET
from dsi.models.names import BUILTIN, model_path
from live_server import Live, Serving, start
from llama_cpp import LlamaCpp, gguf

# Two tests at once on two cores, each with threads for all of them, mostly wait for one another. Who needs
# more threads says so; this is read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
# Ray starts a Python process for each CPU in advance, which these tests never use.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# What is measured beside other tests must not be kept for this machine's user.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="dsi-tests-")
settings.register_profile("dsi", deadline=None, print_blob=True)
settings.load_profile("dsi")
LLAMA_CPP = ("llama_cpp_target", "llama_cpp_drafter")
STARTS_SLOWLY = {
    "live",
    "serving",
    "locked",
    "api",
    "browser",
    "cluster",
    "hosts",
    "llama_cpp_target",
    "llama_cpp_drafter",
}  # fixtures


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests slow that start a server, a browser or a cluster."""
    for item in items:
        if STARTS_SLOWLY.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from traversing all imported modules again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """One server for all tests that do not change its state."""
    server = start("--sp", "2", "--max-running", "8", "--max-waiting", "64", "--max-tokens", "400")
    yield server
    server.kill()


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Starts a server with other options for one test."""
    started: list[Live] = []

    def make(*options: str, env: dict[str, str] | None = None) -> Live:
        started.append(start(*options, env=env))
        return started[-1]

    yield make
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def llama_cpp_target() -> Iterator[LlamaCpp]:
    """llama.cpp's server on the built-in target in float32."""
    with llama_cpp(TARGET) as server:
        yield server


@pytest.fixture(scope="session")
def llama_cpp_drafter() -> Iterator[LlamaCpp]:
    with llama_cpp(DRAFTER) as server:
        yield server


def llama_cpp(role: str) -> LlamaCpp:
    pytest.importorskip("xllamacpp")
    return LlamaCpp(gguf(str(model_path(BUILTIN, role)), "float32"), eos=0, threads=1, slots=2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray for all tests that need it: starting it takes seconds."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the server said where a test of it fails."""
    report = yield
    live = getattr(item, "funcargs", {}).get("live")
    if report.failed and live is not None:
        report.sections.append(("log of the server", "".join(live.log[-60:])))
    return report
