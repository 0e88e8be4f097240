"""Who may import whom, and what importing the core brings along."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dsi"

# The packages in order: each may use those before it.
PACKAGES = (
    "core",
    "sampling",
    "models",
    "fleets",
    "planning",
    "engine",
    "experiments",
    "plot",
    "paper",
    "server",
    "cli",
)
CLOCKS_AND_THREADS = ("time", "threading", "queue", "asyncio", "multiprocessing", "socket")
# Third-party and system modules that only some packages may import.
ALLOWED_IN = {
    "numpy": {"experiments", "engine", "models", "paper", "planning", "plot", "sampling"},
    "torch": {"engine", "models"},
    "transformers": {"engine", "models"},
    "triton": {"models"},
    "ray": {"fleets"},
    "datasets": {"experiments"},
    "matplotlib": {"plot"},
    "rich": {"cli", "plot"},
    "typer": {"cli"},
    **{name: {"server"} for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic")},
    **{name: {"cli", "engine", "experiments", "fleets", "server"} for name in CLOCKS_AND_THREADS},
}
ALLOWED_IN["time"] |= {"models"}  # a draft pipeline launches the next forward in time


def imports() -> Iterator[tuple[str, str, str]]:
    """Every (part, file, imported module) of the project."""
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from ((part, str(path.relative_to(SOURCE)), name) for name in names)


def test_packages_import_only_earlier_packages() -> None:
    strays = {
        (file, name)
        for part, file, name in imports()
        if name.startswith("dsi.") and part in PACKAGES and PACKAGES.index(name.split(".")[1]) > PACKAGES.index(part)
    }
    assert strays == set()


def test_packages_keep_third_party_imports_to_themselves() -> None:
    strays = [(file, name) for part, file, name in imports() if part not in ALLOWED_IN.get(name.split(".")[0], {part})]
    assert strays == []


def test_packages_are_all_in_the_order() -> None:
    assert {part for part, *_ in imports()} - {"__init__", "__main__", "assets"} == set(PACKAGES)


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


CORE = "import dsi.core.sequence, dsi.core.scheduler, dsi.core.generation, dsi.core.policies"


@pytest.mark.parametrize("heavy", ["threading", "asyncio", "numpy", "torch", "multiprocessing", "queue", "socket"])
def test_the_core_is_pure(heavy: str) -> None:
    assert heavy not in loaded(CORE)


def test_help_loads_nothing_heavy() -> None:
    assert not {"numpy", "torch", "matplotlib", "rich"} & loaded("import dsi.cli.main")


REFUSED = """
from io import StringIO
from dsi.cli.main import main
sys.argv, real, sys.stderr = {words}, sys.stderr, StringIO()
try:
    main()
except SystemExit as ended:
    assert ended.code == 2, ended.code
said, sys.stderr = sys.stderr.getvalue(), real
assert said.startswith("dsi: " + {begin!r}), said
"""


@pytest.mark.parametrize(
    ("command", "begin"),
    [
        ("generate hi --sp 0", "SP degree 0:"),
        ("generate hi --target no/such/folder", "no/such/folder:"),
        ("generate hi --temperature -1", "temperature -1.0:"),
        ("generate hi --algorithm auto --lookahead 3", "lookahead 3 with"),
        ("generate hi --target-devices gpu", "device 'gpu':"),
        ("generate hi --fleet magic", "fleet 'magic':"),
        ("chat --vocab magic", "vocab 'magic':"),
        ("compare --dtype int4", "dtype 'int4':"),
        ("serve --port 0 --drafter /nowhere", "/nowhere:"),
        ("plan --cores 1 --target /nowhere", "/nowhere:"),
        ("measure latency --threads 0", "threads 0:"),
        ("measure acceptance --out nowhere/a.json", "nowhere/a.json:"),
    ],
)
def test_a_mistake_is_told_before_anything_heavy_is_loaded(command: str, begin: str) -> None:
    assert not {"torch", "transformers"} & loaded(REFUSED.format(words=["dsi", *command.split()], begin=begin))
