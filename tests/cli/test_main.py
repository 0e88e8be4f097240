"""The commands as a user meets them: in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command import document, dsi
from dsi.cli.main import app
from dsi.engine.engine import Engine

QUICK = ("--tokens", "20", "--repeats", "2")


def test_simulate_one_algorithm() -> None:
    found = document("simulate", "--algorithm", "dsi", *QUICK)
    assert (found["algorithm"], found["label"], found["tokens"]) == ("dsi", "simulated", 20)
    assert found["mean_ms"] > 0
    assert set(found["busy"]) == {*(f"target-{i}" for i in range(1, 8)), "drafter"}


def test_simulate_several_gives_one_table_with_ratios() -> None:
    found = document("simulate", "--algorithm", "nonsi,si,pearl,dsi", *QUICK)
    means = {result["algorithm"]: result["mean_ms"] for result in found["results"]}
    assert list(means) == ["nonsi", "si", "pearl", "dsi"]
    assert found["speedups"]["dsi"]["si"] == pytest.approx(means["si"] / means["dsi"])
    table = dsi("simulate", "--algorithm", "nonsi,dsi", *QUICK).stdout
    assert "speed over non-SI" in table
    assert "simulated: means of 2 runs" in table


def test_simulate_tells_of_machines_requests_and_failures() -> None:
    flags = ("--nodes", "2", "--network-ms", "1", "--requests", "3", "--failures-per-hour", "9", *QUICK)
    table = dsi("simulate", "--algorithm", "nonsi,dsi", *flags).stdout
    for words in ("ms for one of 3", "tokens per second, in all", "time over none failing", "on 2 machines"):
        assert words in table
    found = document("simulate", "--algorithm", "dsi", *flags)
    assert (found["nodes"], found["requests"]) == (2, 3)
    assert found["unfailing_ms"] > 0


def test_simulate_takes_the_best_of_lists() -> None:
    found = document("simulate", "--algorithm", "dsi", "--lookahead", "1,3,9", "--patience", "0,2", *QUICK)
    assert (found["lookahead"] in (1, 3, 9), found["patience"] in (0, 2)) == (True, True)


def test_simulate_waited() -> None:
    found = document("simulate", "--algorithm", "si", "--waited", "--target-ms", "5", "--drafter-ms", "1", *QUICK)
    assert found["label"] == "waited"


def test_every_option_of_the_fleet_is_taken() -> None:
    options = {
        "drafters": "2",
        "pieces": "4",
        "target-ttft-ms": "60",
        "drafter-ttft-ms": "6",
        "per-token-ms": "0.1",
        "jitter": "0.1",
        "network-ms": "1",
        "network-jitter": "0.2",
        "nodes": "2",
        "requests": "2",
        "drafter-copies": "2",
        "failures-per-hour": "100",
        "repair-s": "1",
        "notice-ms": "5",
        "contention": "0.05",
        "horizon": "20",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    plain = document("simulate", "--algorithm", "dsi", *QUICK)
    assert document("simulate", "--algorithm", "dsi", *flags, "--no-eager", *QUICK)["mean_ms"] > plain["mean_ms"]


def test_generate_writes_text_alone_on_stdout() -> None:
    done = dsi("generate", "Once upon a time", "--max-new-tokens", "12")
    assert done.returncode == 0
    assert done.stdout.startswith(", there was a little")
    assert done.stderr.startswith("dsi: 12 tokens in ")
    assert len(done.stderr.splitlines()) == 1


def test_generate_reads_a_pipe_or_a_file_and_gives_figures(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Tom and his dog")
    command = [sys.executable, "-m", "dsi", "generate", "--max-new-tokens", "8", "--json"]
    piped = subprocess.run(command, input="Tom and his dog", capture_output=True, text=True, check=True)
    found = json.loads(piped.stdout.splitlines()[-1])
    filed = document("generate", "--file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8")
    assert (found["text"], found["tokens"], found["label"]) == (filed["text"], 8, "measured")


def test_generate_under_auto_says_what_was_decided() -> None:
    found = document("generate", "Once upon a time", "--algorithm", "auto", "--max-new-tokens", "12")
    assert found["text"].startswith(", there was a little")
    assert (found["algorithm"], found["decisions"][0]["cause"]) == ("auto", "start")
    assert found["overlap"]["rejections"] == len(found["overlap"]["losses"])


def test_chat_answers_each_line() -> None:
    command = [sys.executable, "-m", "dsi", "chat", "--max-new-tokens", "8"]
    done = subprocess.run(command, input="Once upon a time\nThe cat was\n", capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2


def test_compare_checks_that_all_texts_are_equal(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Once upon a time\n\nTom and his dog\n")
    quick = (
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--repeats",
        "1",
        "--max-new-tokens",
        "12",
        "--si-lookaheads",
        "3,5",
    )
    several = "nonsi,si,pearl,dsi,auto"
    found = document("compare", *quick, "--temperature", "0.7", "--algorithm", several)
    assert [row["algorithm"] for row in found["results"]] == several.split(",")
    assert [set(row["overlap"]["idle_share"]) for row in found["results"]] == [{"target-1", "drafter"}] * 5
    assert found["results"][0]["overlap"]["time_over_ideal"] > 1
    assert found["results"][1]["lookahead"] in (3, 5)
    assert all(len(row["rates"]) == 2 and row["tokens_per_second"] > 0 for row in found["results"])
    assert "all equal" in dsi("compare", *quick).stdout


def test_plan(tmp_path: Path) -> None:
    command = ("plan", "--target-ms", "20", "--drafter-ms", "1", "--gpus", "7", "--target-gpus", "2")
    found = document(*command)
    assert (found["sp"], found["lookahead"], found["gpus_used"]) == (3, 7, 7)
    times = [offer["ms"] for offer in found["offers"]]
    assert len(times) == 5
    assert times == sorted(times)
    picture = tmp_path / "plan.svg"
    said = dsi(*command, "--plot", str(picture)).stdout
    assert "ceil(20 / (7 * 1)) = 3 <= 3" in said
    assert "acceptance assumed" in said
    assert "to run the first: dsi generate" in said
    assert picture.stat().st_size > 1000


def test_plan_from_measurements_of_this_machine() -> None:
    found = document("plan", "--cores", "1")
    assert {offer["algorithm"] for offer in found["offers"]} == {"nonsi", "si"}
    assert found["evidence"]["sources"]["acceptance"] == "measured"
    assert 0.5 < found["evidence"]["rates"]["match"] < 1
    first = found["offers"][0]["algorithm"]  # which of them is faster depends on what else the machine does
    assert found["command"].startswith(f"dsi generate --target builtin --drafter builtin --algorithm {first}")


def test_table1() -> None:
    found = document("paper", "table1")
    assert (found["equal"], len(found["cells"])) == (24, 24)
    assert "24 of 24 cells equal" in dsi("paper", "table1").stdout


def test_timeline_draws_in_the_terminal_and_writes_what_is_asked(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "a.png", "a.json")]
    outs = [part for file in files for part in ("--out", str(file))]
    done = dsi("timeline", "--algorithm", "si,dsi", "--tokens", "8", *outs)
    assert done.returncode == 0
    assert "DSI: 8 tokens in" in done.stdout
    assert all(file.stat().st_size > 500 for file in files)
    assert "traceEvents" in json.loads(files[2].read_text())
    again = dsi("timeline", "--trace", outs[-1])
    assert again.stdout == done.stdout
    found = document("timeline", "--algorithm", "dsi", "--tokens", "8")
    assert (found["label"], len(found["runs"][0]["times_ms"])) == ("simulated", 8)


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
        ("simulate --tokens 0", "tokens 0: must be at least 1"),
        ("simulate --repeats 0", "repeats 0: must be at least 1"),
        ("simulate --waited --network-ms 3", "network 3.0 ms, contention 0.0: only virtual time has them"),
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
        ("simulate --waited --failures-per-hour 9", "9 failures per hour: only virtual time has them"),
        ("timeline --algorithm none", "algorithm 'none': must be one of nonsi, si, pearl, dsi, auto"),
        ("timeline --out figure.gif", "figure.gif: the name must end in .svg, .png or .json"),
        ("timeline --out nowhere/a.svg", "nowhere/a.svg: there is no folder nowhere"),
        ("plan --target-ms 20 --drafter-ms 1 --gpus 1 --target-gpus 2", "1 processors: one target needs 2"),
        ("plan --target-ms 20 --drafter-ms 1 --gpus 0", "0 processors: must be between 1 and 1000"),
        ("plan --target-ms 20 --drafter-ms 1", "processors: give --gpus, or --cores of this machine"),
        ("plan --gpus 3", "--target-ms is missing: give it, or a --profile that has it"),
        ("plan --gpus 3 --target-ms 9 --drafter-ms 1 --scales 2", "scales 2: must be between 0 and 1"),
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
        ("generate hi --dtype int4", "dtype 'int4': must be float32 or bfloat16"),
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
def test_bad_input_is_one_sentence_and_exit_status_2(command: str, sentence: str) -> None:
    done = dsi(*command.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"dsi: {sentence}\n")


@pytest.mark.parametrize("command", ["generate", "chat", "compare", "serve"])
def test_the_commands_say_how_long_a_server_on_a_cluster_has(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **options: Any) -> None:
        raise ValueError(f"asked for {options['hang_seconds']} and {options['start_seconds']}")

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr("dsi.server.sockets.listen", lambda *_: None)
    words = [command, "--fleet", "ray", "--hang-seconds", "5", "--start-seconds", "300"]
    done = CliRunner().invoke(app, [*words, *(["Once"] if command == "generate" else [])])
    assert str(done.exception) == "asked for 5.0 and 300.0"


@pytest.mark.parametrize("name", ["hang", "start"])
def test_that_is_refused_where_there_is_no_cluster(name: str) -> None:
    done = CliRunner().invoke(app, ["chat", f"--{name}-seconds", "5"])
    assert str(done.exception) == f"{name} seconds 5: is for servers on Ray; say --fleet ray"


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


def without_ray(*commands: str) -> subprocess.CompletedProcess[str]:
    """Several commands where Ray is not installed, in one process."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *commands], capture_output=True, text=True, input="Once\n"
    )


def test_a_fleet_on_ray_without_it_is_one_sentence() -> None:
    names = ("generate hi", "chat", "compare", "serve --port 0")
    done = without_ray(*(f"dsi {name} --fleet ray" for name in names))
    sentence = "dsi: a fleet on Ray needs Ray: pip install 'dsi[ray]'\nstatus 2\n"
    assert (done.stdout, done.stderr, done.returncode) == ("", sentence * len(names), 0)


def test_all_else_works_without_ray() -> None:
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
def test_what_cannot_be_parsed_is_one_sentence_too(command: str) -> None:
    done = dsi(*command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dsi: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_narrow_terminal_is_drawn_in() -> None:
    environment = {**os.environ, "COLUMNS": "10"}
    command = [sys.executable, "-m", "dsi", "timeline", "--tokens", "4", "--algorithm", "dsi"]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        *("", "generate", "chat", "compare", "simulate", "timeline", "plan", "paper", "paper table1"),
        *("measure", "measure latency", "measure acceptance"),
    ],
)
def test_help_has_an_example(command: str) -> None:
    done = dsi(*command.split(), "--help")
    assert done.returncode == 0
    assert command == "paper" or "Example: dsi" in done.stdout


def test_long_work_says_how_far_it_is() -> None:
    done = dsi("simulate", "--algorithm", "dsi", "--tokens", "200", "--repeats", "250", "--json")
    assert "of 250 runs" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_version() -> None:
    assert dsi("--version").stdout == "dsi 0.1.0\n"
