"""Who may import whom, and what importing the core brings along."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dsi"

# Each part of the project, and the other parts it may use.
MAY_USE = {
    "core": set[str](),
    "kin": set(),
    "means": set(),
    "planner": set(),
    "theory": {"planner"},
    "sampling": {"core"},
    "models": {"core", "kin", "means", "sampling"},
    "overlap": {"core", "models"},
    "request": {"core", "models", "overlap"},
    "fleets": {"core", "kin", "models", "overlap", "sampling"},
    "engine": {"core", "models", "overlap", "request"},
    "translation": {"means", "models"},
    "loading": {"core", "fleets", "kin", "means", "measure", "models", "planner", "translation"},
    "evidence": {"core", "fleets", "kin", "loading", "measure", "models", "prompts"},
    "dropin": {"core", "engine", "fleets", "loading", "models", "planner", "request"},
    "placement": set(),
    "clustered": {"core", "fleets", "loading", "means", "models", "translation"},
    "placed": {"core", "fleets", "loading", "means", "measure", "models", "placement"},
    "repo": set(),
    "speech": {
        "clustered",
        "core",
        "engine",
        "evidence",
        "fleets",
        "loading",
        "means",
        "measure",
        "models",
        "placed",
        "placement",
        "request",
    },
    "prompts": {"core", "models"},
    "measure": {
        "core",
        "engine",
        "fleets",
        "loading",
        "means",
        "models",
        "overlap",
        "planner",
        "request",
        "sampling",
        "speech",
    },
    "plot": {"measure"},
    "paper": {"measure", "planner", "plot", "theory"},
    "show": {"measure", "plot", "request"},
    "serve": {
        "core",
        "engine",
        "fleets",
        "loading",
        "measure",
        "models",
        "overlap",
        "plot",
        "request",
        "speech",
    },
    "cli": {
        "cli_budget",
        "cli_engine",
        "cli_measure",
        "cli_options",
        "cli_paper",
        "cli_plan",
        "cli_serve",
        "core",
        "engine",
        "measure",
        "planner",
        "plot",
        "show",
    },
    "cli_budget": {"cli_engine", "measure", "planner", "plot", "show"},
    "cli_engine": {"core", "fleets", "show", "speech"},
    "cli_options": set(),
    "cli_plan": {"cli_options", "evidence", "means", "measure", "planner", "plot", "show"},
    "cli_serve": {"cli_engine", "cli_options", "serve"},
    "cli_measure": {"loading", "means", "measure", "placed", "placement", "prompts", "show"},
    "cli_paper": {"paper", "show"},
    "__main__": {"cli"},
    "__init__": {
        "core",
        "dropin",
        "engine",
        "fleets",
        "models",
        "planner",
        "request",
        "speech",
    },  # public names
}
CLOCKS_AND_THREADS = ("time", "threading", "queue", "asyncio", "multiprocessing", "socket")
# Modules of the world that only some parts may touch.
KEEPERS = {
    "numpy": {"measure", "models", "paper", "plot", "sampling", "theory"},
    "torch": {"clustered", "dropin", "evidence", "loading", "models", "placed", "placement"},
    "transformers": {"clustered", "loading", "models"},
    "triton": {"models"},
    "ray": {"fleets"},
    "datasets": {"prompts"},
    "matplotlib": {"plot"},
    "rich": {"cli_engine", "cli_measure", "plot", "show"},
    "typer": {"cli", "cli_measure", "cli_options", "cli_paper", "cli_plan", "cli_serve"},
    **{name: {"serve"} for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic")},
    **{
        name: {"clustered", "fleets", "engine", "loading", "measure", "serve", "show"}
        for name in CLOCKS_AND_THREADS
    },
}
KEEPERS["time"] |= {"models"}  # a chain of forwards sends the next one in time


def imports() -> Iterator[tuple[str, str, str]]:
    """Every (part, file, imported module) of the project."""
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from ((part, str(path.relative_to(SOURCE)), name) for name in names)


def test_each_part_uses_only_what_it_may() -> None:
    strays = [
        (file, name)
        for part, file, name in imports()
        if name.startswith("dsi.") and name.split(".")[1] not in MAY_USE[part] | {part}
    ]
    assert strays == []


def test_the_world_is_touched_only_where_it_should_be() -> None:
    strays = [
        (file, name) for part, file, name in imports() if part not in KEEPERS.get(name.split(".")[0], {part})
    ]
    assert strays == []


def test_every_part_is_named_in_the_rules() -> None:
    assert {part for part, *_ in imports()} <= set(MAY_USE)


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


CORE = "import dsi.core.context, dsi.core.dispatch, dsi.core.generation, dsi.core.policies"


@pytest.mark.parametrize(
    "heavy", ["threading", "asyncio", "numpy", "torch", "multiprocessing", "queue", "socket"]
)
def test_the_core_is_pure(heavy: str) -> None:
    assert heavy not in loaded(CORE)


def test_help_loads_nothing_heavy() -> None:
    assert not {"numpy", "torch", "matplotlib", "rich"} & loaded("import dsi.cli")


REFUSED = """
from io import StringIO
from dsi.cli import main
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
    assert not {"torch", "transformers"} & loaded(
        REFUSED.format(words=["dsi", *command.split()], begin=begin)
    )
