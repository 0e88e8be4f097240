"""Who may import whom, and what importing the core brings along."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    "httpx": {"fleets"},
    "datasets": {"experiments"},
    "matplotlib": {"plot"},
    "rich": {"cli", "plot"},
    "typer": {"cli"},
    **{name: {"server"} for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic")},
    **{name: {"cli", "engine", "experiments", "fleets", "server"} for name in CLOCKS_AND_THREADS},
}
ALLOWED_IN["time"] |= {"models"}  # a draft pipeline launches the next forward in time
ALLOWED_IN["threading"] |= {"models"}  # forwards of one model that run at once share its table of KV caches


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


def run_script(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


LOADED = "\nimport sys\nprint(*sorted({name.split('.')[0] for name in sys.modules}))"
CORE = "import dsi.core.sequence, dsi.core.scheduler, dsi.core.generation, dsi.core.policies"
HELP = "from dsi.cli.main import app; [app([*c.split(), '--help'], standalone_mode=False) for c in ('', 'generate')]"


def test_core_imports_no_clock_no_thread_and_nothing_heavy() -> None:
    heavy = {"threading", "asyncio", "numpy", "torch", "multiprocessing", "queue", "socket"}
    assert not heavy & set(run_script(CORE + LOADED).split())


def test_help_imports_nothing_heavy() -> None:
    assert not {"numpy", "torch", "matplotlib", "rich"} & set(run_script(HELP + LOADED).splitlines()[-1].split())


MISTAKES = {
    "generate hi --sp 0": "SP degree 0:",
    "generate hi --target no/such/folder": "no/such/folder:",
    "generate hi --temperature -1": "temperature -1.0:",
    "generate hi --algorithm auto --lookahead 3": "lookahead 3 with",
    "generate hi --target-devices gpu": "device 'gpu':",
    "generate hi --fleet magic": "fleet 'magic':",
    "generate hi --target magic+http://a": "endpoint 'magic+http://a':",
    "generate hi --target http://a --target builtin": "2 targets:",
    "serve --port 0 --target http://a --fleet ray": "fleet:",
    "chat --vocab magic": "vocab 'magic':",
    "compare --dtype int4": "dtype 'int4':",
    "serve --port 0 --drafter /nowhere": "/nowhere:",
    "plan --cores 1 --target /nowhere": "/nowhere:",
    "measure latency --threads 0": "threads 0:",
    "measure acceptance --out nowhere/a.json": "nowhere/a.json:",
}
# Runs commands one after another, and prints of each its status, message and the heavy modules loaded by then.
REFUSALS = """
import json, sys
from contextlib import redirect_stderr
from io import StringIO
from dsi.cli.main import main
for command in sys.argv[1:]:
    with redirect_stderr(StringIO()) as message:
        try:
            main(command.split())
        except SystemExit as exit:
            code = exit.code
    print(json.dumps([code, message.getvalue(), sorted({"torch", "transformers"} & sys.modules.keys())]))
"""


def test_mistakes_are_reported_before_anything_heavy_is_imported() -> None:
    refusals = [json.loads(line) for line in run_script(REFUSALS, *MISTAKES).splitlines()]
    for (command, begin), (code, message, heavy) in zip(MISTAKES.items(), refusals, strict=True):
        assert (code, heavy) == (2, []), command
        assert message.startswith(f"dsi: {begin}"), command
