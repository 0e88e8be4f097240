"""`dsi compare --budget`: the same processors for every algorithm."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from command import document, dsi_here, refused
from dsi.cli.budget import check_given
from dsi.experiments.profile import Profile

LATENCY = {
    "target": {"ttft_ms": {"mean": 30.0}, "tpot_ms": {"mean": 20.0}},
    "drafter": {"ttft_ms": {"mean": 1.5}, "tpot_ms": {"mean": 2.0}},
    "per_token_ms": 0.5,
}
ACCEPTANCE = {"rate": 0.8}
HERE = len(os.sched_getaffinity(0))
QUICK = ("--repeats", "1", "--max-new-tokens", "8", "--si-lookaheads", "3")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    parts = {"latency": LATENCY, "acceptance": ACCEPTANCE}
    Profile("big", "small", "essays", parts).save(path)
    return path


@pytest.mark.slow
def test_budget_measures_cores_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "tales.txt").write_text("Once upon a time\n")
    picture = tmp_path / "a.svg"
    cores = min(2, HERE)
    result = document(
        "compare", "--budget", "--prompts", tmp_path / "tales.txt", "--cores", cores, "--out", picture, *QUICK
    )
    assert (result["label"], result["cores"], result["equal"]) == ("measured", cores, True)
    [tales] = result["classes"]
    assert tales["class"] == "tales"
    names = [row["algorithm"] for row in tales["results"]]
    assert names == (["nonsi"] * 2 + ["si"] * 2 if cores == 2 else ["nonsi", "si"]) + ["pearl", "dsi", "auto"]
    assert all(len(row["rates"]) == 1 and row["label"] == "measured" for row in tales["results"])
    plain = tales["results"][0]
    assert plain["per_token"]["target_forwards"] == 1
    assert plain["speed_over_nonsi"] == 1
    assert (plain["ms_to_token_10"], plain["ms_to_last_token"] > plain["ms_to_token_1"] > 0) == (None, True)
    assert tales["verdict"]["winner"] in [row["name"] for row in tales["results"]]
    assert result["files"] == [str(picture)]
    assert "measured" in picture.read_text()


@pytest.mark.slow
def test_budget_simulates_more_cores_than_this_machine_has(tmp_path: Path) -> None:
    (tmp_path / "tales.txt").write_text("Once upon a time\n")
    asked = (
        "--cores",
        HERE + 1,
        "--algorithm",
        "dsi",
        "--parallel-fraction",
        "0.5",
        "--prompts",
        tmp_path / "tales.txt",
    )
    result = document("compare", "--budget", *asked, *QUICK)
    assert (result["label"], result["cores"], result["parallel_fraction"]) == ("simulated", HERE + 1, 0.5)
    assert result["scales"] == result["parallel_fraction"]  # its old name, for one release
    [tales] = result["classes"]
    assert 0 < tales["acceptance"] <= 1
    assert {row["label"] for row in tales["results"]} == {"simulated"}
    assert {row["algorithm"] for row in tales["results"]} == {"nonsi", "dsi"}
    rates = [row["tokens_per_second"] for row in tales["results"]]
    one = 1000 / result["target_ms"]  # non-SI with all, half of whose forwards scales, and with one
    assert rates[:2] == pytest.approx([one / (0.5 + 0.5 / (HERE + 1)), one])


def test_budget_simulates_gpus_from_a_profile(profile: Path, tmp_path: Path) -> None:
    asked = ("--budget", "--gpus", 4, "--profile", profile, "--repeats", 1, "--max-new-tokens", 40)
    done = dsi_here("compare", *asked, "--out", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("essays, acceptance 0.80 (simulated)\n")
    for words in ("non-SI, all 4 GPUs", "DSI, 3 targets of 1 GPU", "auto, 1 target of 3 GPUs", "\nwinner: "):
        assert words in done.stdout
    assert "None" not in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("simulated: 4 texts of each class and configuration on 4 GPUs; a target forward 20.00 ms")
    assert last.endswith("80% of a target forward is divided among its GPUs")
    assert "wrote " in done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


ARRANGES = "not with --budget, which arranges the processors for each algorithm"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--budget --cores 0", "cores 0: must be between 1 and 1000"),
        (
            "--budget --cores 1 --parallel-fraction 0.5",
            f"--parallel-fraction 0.5: 1 core of {HERE} here, so all is measured",
        ),
        ("--budget --cores 999 --parallel-fraction 2", "parallel fraction 2.0: must be between 0 and 1"),
        ("--budget --max-new-tokens 0", "max new tokens 0: must be at least 1"),
        ("--budget --fleet ray", f"--fleet ray: {ARRANGES}"),
        (
            "--budget --rule reject --temperature 1",
            "rule reject at temperature 1.0 with --budget: gives each algorithm its own text; take match",
        ),
        (
            "--budget --gpus 4 --profile nowhere.json",
            "nowhere.json: cannot be read (No such file or directory)",
        ),
        ("--budget --out figure.json", "figure.json: the name must end in .svg or .png"),
        ("--budget --out nowhere/a.svg", "nowhere/a.svg: there is no folder nowhere"),
        ("--cores 2", "--cores 2: is for --budget"),
    ],
)
def test_budget_reports_a_mistake_in_one_sentence(command: str, sentence: str) -> None:
    assert refused("compare", *command.split()) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"out": [Path("a.svg")]}, "--out a.svg: is for --budget"),
        ({"budget": True, "target_devices": "cuda:0/8"}, f"--target-devices cuda:0/8: {ARRANGES}"),
        ({"budget": True, "threads": 2}, f"--threads 2: {ARRANGES}"),
        ({"budget": True, "gpus": 4}, "--gpus 4: --gpus and --profile go together"),
        ({"budget": True, "profile": Path("a.json")}, "--profile a.json: --gpus and --profile go together"),
        ({"budget": True, "gpus": 4, "profile": Path("a.json"), "cores": 2}, "--cores 2: not with --gpus"),
        (
            {"budget": True, "gpus": 4, "profile": Path("a.json"), "drafter": ["ngram", "builtin"]},
            "--drafter ngram builtin: not with --profile, from which all is simulated",
        ),
    ],
)
def test_check_given_refuses_options_without_effect(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check_given(given)


@pytest.mark.parametrize(
    "given",
    [
        {"repeats": 2, "sp": 3},
        {"budget": True, "cores": 8, "parallel_fraction": 0.5, "drafter": ["ngram"], "out": []},
        {"budget": True, "gpus": 8, "profile": Path("a.json"), "algorithm": "dsi"},
    ],
)
def test_check_given_accepts_options_that_go_together(given: dict[str, Any]) -> None:
    options = dict(given)
    check_given(given)
    assert given == options
    with pytest.raises(ValueError, match=r"^--"):  # one more option is one too many
        check_given(given | ({"fleet": "ray"} if "budget" in given else {"cores": 2}))


def test_budget_refuses_one_gpu(profile: Path) -> None:
    assert refused("compare", "--budget", "--gpus", 1, "--profile", profile) == "gpus 1: must be between 2 and 1000"
