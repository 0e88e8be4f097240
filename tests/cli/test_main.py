"""What all commands share: errors, help, and doing without Ray."""

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from typer.testing import CliRunner

from command import dsi_here, python, refused
from dsi.cli.main import app
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("simulate --algorithm medusa", "algorithm 'medusa': must be one of nonsi, si, pearl, dsi, auto"),
        ("simulate --target-ms 0", "target latency 0.0 ms: must be above 0"),
        ("simulate --drafter-ms -3", "drafter latency -3.0 ms: must be above 0"),
        ("simulate --acceptance 1.5", "acceptance 1.5: must be between 0 and 1"),
        ("simulate --lookahead 0", "lookahead 0: must be at least 1"),
        ("simulate --lookahead two", "lookahead 'two': must be whole numbers separated by commas"),
        ("simulate --sp 0", "SP degree 0: must be between 1 and 1000"),
        ("simulate --tree -1", "tree -1: must be at least 0"),
        *(
            (
                f"{command} --{name} 2",
                f"--{name}: is gone with runner-ups for spare targets; use --tree",
            )
            for command in ("simulate", "timeline")
            for name in ("branches", "spare-targets")
        ),
        ("simulate --tokens 0", "tokens 0: must be at least 1"),
        ("simulate --repeats 0", "repeats 0: must be at least 1"),
        ("simulate --real-time --network-ms 3", "network 3.0 ms, contention 0.0: only virtual time has them"),
        (
            "simulate --sp 2 --nodes 0",
            "nodes (machines, each with a server) 0: must be between 1 and 3",
        ),
        (
            "simulate --sp 2 --nodes 4",
            "nodes (machines, each with a server) 4: must be between 1 and 3",
        ),
        ("simulate --requests 0", "requests 0: must be between 1 and 10000"),
        ("simulate --failures-per-hour -1", "failures per hour -1.0: must be between 0 and 100000"),
        ("simulate --real-time --failures-per-hour 9", "9 failures per hour: only virtual time has them"),
        ("timeline --algorithm none", "algorithm 'none': must be one of nonsi, si, pearl, dsi, auto"),
        ("timeline --out figure.gif", "figure.gif: the name must end in .svg, .png or .json"),
        ("timeline --out nowhere/a.svg", "nowhere/a.svg: there is no folder nowhere"),
        ("plan --target-ms 20 --drafter-ms 1 --gpus 1 --target-gpus 2", "1 processors: one target needs 2"),
        ("plan --target-ms 20 --drafter-ms 1 --gpus 0", "0 processors: must be between 1 and 1000"),
        ("plan --target-ms 20 --drafter-ms 1", "processors: give --gpus, or --cores of this machine"),
        ("plan --gpus 3", "--target-ms is missing: give it, or a --profile that has it"),
        (
            "plan --gpus 3 --target-ms 9 --drafter-ms 1 --parallel-fraction 2",
            "parallel fraction 2: must be between 0 and 1",
        ),
        (
            "plan --gpus 3 --target-ms 9 --drafter-ms 1 --acceptance 7",
            "acceptance 7: must be between 0 and 1",
        ),
        ("plan --cores 2 --target-ms 9", "cores 2: are measured here; with given figures say --gpus 2"),
        (
            "plan --gpus 3 --target-ms 9 --drafter-ms 1 --plot x.pdf",
            "x.pdf: the name must end in .svg or .png",
        ),
        (
            "timeline --lookahead 2,5",
            "lookahead '2,5': a timeline shows one run, so must be one number or auto",
        ),
        ("timeline --trace nowhere.json", "nowhere.json: cannot be read (no such file or directory)"),
        ("timeline --out .", ".: the name must end in .svg, .png or .json"),
        ("generate hi --target nowhere/at/all/", "nowhere/at/all/: there is no such model folder"),
        ("generate hi --algorithm magic", "algorithm 'magic': must be one of nonsi, si, pearl, dsi, auto"),
        ("generate hi --sp 0", "SP degree 0: must be at least 1"),
        ("generate hi --lookahead none", "lookahead 'none': must be a whole number or auto"),
        ("generate hi --vocab magic", "vocab 'magic': must be same, tli, slem or auto"),
        ("generate hi --dtype int4", "dtype 'int4': must be float32, bfloat16 or int8"),
        ("generate hi --threads 0", "threads 0: must be at least 1"),
        ("generate --file nowhere.txt", "[Errno 2] No such file or directory: 'nowhere.txt'"),
        ("compare --algorithm dsi,magic", "algorithm 'magic': must be one of nonsi, si, pearl, dsi, auto"),
        (
            "generate hi --algorithm auto --lookahead 3",
            "lookahead 3 with the algorithm auto: it finds its own; leave one of them out",
        ),
        ("compare --repeats 0", "repeats 0: must be at least 1"),
        ("simulate --network-ms inf", "network delay in ms inf: must be between 0 and 1e+09"),
        ("plan --target-ms 20 --drafter-ms 0 --gpus 4", "drafter latency 0.0 ms: must be above 0"),
    ],
)
def test_main_reports_a_mistake_in_one_sentence(command: str, sentence: str) -> None:
    assert refused(*command.split()) == sentence


@pytest.mark.parametrize("command", ["generate", "chat", "compare", "serve"])
def test_commands_pass_time_limits_of_servers_on_ray(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: EngineConfig, **_: Any) -> None:
        raise ValueError(f"asked for {config.hang_seconds} and {config.start_seconds}")

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr("dsi.server.sockets.listen", lambda *_: None)
    words = [command, "--fleet", "ray", "--hang-seconds", "5", "--start-seconds", "300"]
    done = CliRunner().invoke(app, [*words, *(["Once"] if command == "generate" else [])])
    assert str(done.exception) == "asked for 5.0 and 300.0"


def test_start_seconds_are_refused_without_ray() -> None:
    done = CliRunner().invoke(app, ["chat", "--start-seconds", "5"])
    assert str(done.exception) == "start seconds 5: is for servers on Ray; say --fleet ray"


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # so that it cannot be imported
from dsi.cli.main import main
for command in sys.argv[1:]:
    sys.argv = command.split()
    try:
        main()
    except SystemExit as ended:
        print("status", ended.code or 0, file=sys.stderr)
"""


def without_ray(*commands: str) -> CompletedProcess[str]:
    """Several commands where Ray is not installed, in one process."""
    return python(WITHOUT_RAY, *commands, stdin="Once\n")


@pytest.mark.slow
def test_commands_report_that_ray_is_not_installed() -> None:
    names = ("generate hi", "chat", "compare", "serve --port 0")
    done = without_ray(*(f"dsi {name} --fleet ray" for name in names))
    sentence = "dsi: a fleet on Ray needs Ray: pip install 'dsi[ray]'\nstatus 2\n"
    assert (done.stdout, done.stderr, done.returncode) == ("", sentence * len(names), 0)


@pytest.mark.slow
def test_commands_work_without_ray() -> None:
    done = without_ray(
        "dsi generate hi --max-new-tokens 2",
        "dsi simulate --tokens 5 --repeats 1",
        "dsi plan --target-ms 20 --drafter-ms 1 --gpus 2",
        "dsi measure latency --count 1 --tokens 2",
        "dsi serve --help",
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("status")] == ["status 0"] * 5


@pytest.mark.parametrize("command", ["simulate --sp many", "simulate --nonsense", "dance", "paper table9"])
def test_main_reports_what_cannot_be_parsed_in_one_sentence(command: str) -> None:
    assert len(refused(*command.split())) > 10


@pytest.mark.parametrize(
    "command",
    [
        *("", "generate", "chat", "compare", "simulate", "timeline", "plan", "paper", "paper table1"),
        *("measure", "serve", "measure latency", "measure acceptance"),
    ],
)
def test_help_has_an_example(command: str) -> None:
    done = dsi_here(*command.split(), "--help")
    assert done.returncode == 0
    assert command == "paper" or "Example: dsi" in done.stdout


def test_main_prints_the_version() -> None:
    assert dsi_here("--version").stdout == "dsi 0.1.0\n"


def test_generate_refuses_invalid_utf8(tmp_path: Path) -> None:
    invalid = b"caf\xe9".decode(errors="surrogateescape")
    assert refused("generate", invalid) == "a prompt with the byte 0xe9 at position 3: is not valid UTF-8"
    sentence = "a stop string with the byte 0xe9 at position 3: is not valid UTF-8"
    assert refused("generate", "x", "--stop", invalid) == sentence
    (tmp_path / "text").write_bytes(b"caf\xe9")
    sentence = f"{tmp_path / 'text'}: is not UTF-8 text (byte 0xe9 at position 3)"
    assert refused("generate", "--file", tmp_path / "text") == sentence
    assert refused("compare", "--prompts", tmp_path / "text") == sentence
