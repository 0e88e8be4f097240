"""`dsi measure`, and the commands that read its profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from command import document, document_here, dsi, refused
from dsi.experiments.profile import Profile
from dsi.models.names import model_path

LATENCY = {
    "target": {"ttft_ms": {"mean": 30.0}, "tpot_ms": {"mean": 20.0}},
    "drafter": {"ttft_ms": {"mean": 1.5}, "tpot_ms": {"mean": 2.0}},  # a first forward that was lucky
    "per_token_ms": 0.5,
}
PROFILE = Profile("big", "small", "stories").with_part("latency", LATENCY)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt nothing, with a context of 96."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=96,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path("builtin", "target")).save_pretrained(path)
    return path


@pytest.mark.slow
def test_measure_writes_one_profile_that_other_commands_read(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    table = dsi("measure", "latency", "--count", 3, "--tokens", 4, "--out", out)
    assert "TTFT/TPOT" in table.stdout
    assert "measured: 3 prompts of builtin, 4 tokens each" in table.stdout
    assert f"wrote {out}" in table.stderr
    found = document("measure", "acceptance", "--count", 3, "--tokens", 40, "--out", out)
    profile = Profile.load(out)
    assert (profile.target, profile.drafter, profile.dataset) == ("builtin", "builtin", "builtin")
    assert found["acceptance"] == profile.parts["acceptance"]
    assert found["label"] == "measured"
    assert 0.4 < found["acceptance"]["rate"] < 1
    first, second, third = found["acceptance"]["rank_counts"]
    assert first == round(found["acceptance"]["rate"] * found["acceptance"]["places"]) > second > third > 0
    assert profile.chances()[0] == found["acceptance"]["rate"]
    assert first + second + third <= found["acceptance"]["places"] == 120
    assert profile.number("drafter_ms") < profile.number("target_ms") < profile.number("target_ttft_ms")
    plan = document_here("plan", "--profile", out, "--gpus", 8)
    assert plan["sp"] >= 1
    simulated = document_here("simulate", "--algorithm", "dsi", "--profile", out, "--tokens", 20, "--repeats", 2)
    assert simulated["acceptance"] == found["acceptance"]["rate"]


@pytest.mark.slow
def test_measure_compares_rules_on_the_same_texts(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    few = ("measure", "acceptance", "--count", 2, "--tokens", 10, "--lookahead", 2, "--out", out)
    table = dsi(*few, "--rule", "reject,specinfer", "--rule", "block", "--temperature", "0,0.7")
    assert table.returncode == 0, table.stderr
    heads, *rows = (line.split() for line in table.stdout.splitlines()[:5])
    assert heads[:2] == ["temperature", "rule"]
    assert [row[:2] for row in rows] == [
        ["0", "any"],
        ["0.7", "reject"],
        ["0.7", "specinfer,"],
        ["0.7", "block"],
    ]
    assert "at temperature 0 nothing is left to chance: all rules are one, and measured once" in table.stdout
    found = Profile.load(out).parts["rules"]
    assert (found["prompts"], found["lookahead"]) == (2, 2)
    _, reject, specinfer, _ = found["results"]
    assert [(each["rule"], each["guesses"]) for each in (reject, specinfer)] == [
        ("reject", 1),
        ("specinfer", 2),
    ]
    assert [len(each["rank_counts"]) for each in found["results"]] == [3, 0, 0, 0]  # other rules have no rank
    assert "first choice" in table.stdout
    assert reject["places"]["count"] == specinfer["places"]["count"] == 20
    assert reject["blocks"]["count"] == 10
    assert reject["promised"] == pytest.approx(reject["ceiling"])
    assert reject["promised"] < specinfer["promised"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--rule guess", "rule 'guess': must be one of match, reject, block, specinfer"),
        ("--rule match, --temperature 1", "rule '': must be one of"),
        ("--rule match --temperature 0,-1", "temperature -1.0: must be 0 (greedy) or a positive number"),
        ("--rule match --temperature warm", "temperature 'warm': must be numbers separated by commas"),
        ("--rule match --lookahead 0", "lookahead 0: must be at least 1"),
        ("--rule match --tokens 4", "tokens 4: must be at least the lookahead, 5"),
        ("--temperature 1", "temperature 1: needs a --rule"),
    ],
)
def test_measure_refuses_rules_that_cannot_be_measured(options: str, sentence: str) -> None:
    assert sentence in refused("measure", "acceptance", *options.split())


@pytest.mark.slow
def test_measure_loads_a_pair_from_folders_and_prompts_from_a_file(tmp_path: Path, tiny: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["Tom had a cat.", "A very long story. " * 30, "The sun was up.", "Lily sang."]
    prompts.write_text("".join(json.dumps({"turns": [text, "and then?"]}) + "\n" for text in texts))
    pair = ("--target", tiny, "--drafter", tiny, "--dataset", prompts, "--template", "spec-bench")
    done = dsi("measure", "acceptance", *pair, "--tokens", 16)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:2] == [
        "dsi: skipped 1 prompt without room for 16 tokens in the models' context of 96",
        "dsi: 3 prompts instead of 50: there are no more",
    ]
    assert "too few rejections" in done.stdout  # a model agrees with itself
    assert "3 of 3" in done.stdout
    found = document("measure", "latency", *pair, "--tokens", 3, "--threads", 2, "--dtype", "bfloat16")
    assert (found["target"], found["dataset"]) == (str(tiny), "prompts.jsonl")
    assert (found["latency"]["prompts"], found["latency"]["skipped"]) == (3, 1)
    assert [point["new_tokens"] for point in found["latency"]["curve"]] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--dataset mtbench", "dataset 'mtbench': must be builtin, humaneval"),
        (
            "--dataset FOLDER/fields.jsonl",
            "fields.jsonl: line 2 has no field 'prompt'; its fields are text, code",
        ),
        ("--dataset FOLDER/broken.jsonl", "broken.jsonl: line 1 is not JSON"),
        ("--dataset FOLDER/empty.jsonl", "empty.jsonl: has no prompt in it"),
        ("--dataset FOLDER/none.jsonl", "none.jsonl: there is no such file"),
        ("--count 0", "count 0: must be at least"),
        ("--tokens 0", "tokens 0: must be at least"),
        ("--out FOLDER/none/a.json", "there is no folder"),
        ("--out /proc/a.json", "/proc/a.json: cannot be written"),
        (
            "--out FOLDER/other.json",
            "is a profile of target big, drafter small, dataset stories, not of target builtin",
        ),
        ("--out FOLDER/bad.json", "bad.json: is not JSON"),
        ("--target nowhere/at/all/ --out FOLDER/a.json", "nowhere/at/all/: there is no such model folder"),
        ("--target Vicuna-7B --out FOLDER/a.json", "lmsys/vicuna-7b-v1.3: cannot be loaded"),
        ("--drafter ngram --out FOLDER/a.json", "ngram: is no model"),
    ],
)
def test_measure_reports_a_mistake_and_writes_nothing(tmp_path: Path, options: str, sentence: str) -> None:
    (tmp_path / "fields.jsonl").write_text('{"prompt": "a"}\n{"text": "b", "code": "c"}\n')
    (tmp_path / "broken.jsonl").write_text("{prompt}\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.json").write_text("{")
    PROFILE.save(tmp_path / "other.json")
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    command = "acceptance" if len(options) % 2 else "latency"  # they share what refuses
    assert sentence in refused("measure", command, *options.replace("FOLDER", str(tmp_path)).split())
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before


def test_profile_gives_only_what_options_do_not(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert document_here("plan", "--profile", path, "--gpus", 6)["inequality"] == "ceil(20 / (2 * 2)) = 5 <= 5"
    own = document_here("plan", "--profile", path, "--gpus", 6, "--target-ms", 10)
    assert own["inequality"] == "ceil(10 / (1 * 2)) = 5 <= 5"
    quick = ("simulate", "--algorithm", "nonsi", "--tokens", 10, "--repeats", 2, "--profile", path)
    assert "profile.json: has no number acceptance.rate" in refused(*quick)
    assert document_here(*quick, "--acceptance", 0.5)["mean_ms"] == 30 + 9 * 20
    assert document_here(*quick, "--acceptance", 0.5, "--target-ms", 40)["mean_ms"] == 10 * 40
    PROFILE.with_part("acceptance", {"rate": 0.9}).save(path)
    assert document_here(*quick)["acceptance"] == 0.9


def test_profile_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert "profile.json: cannot be read" in refused("plan", "--gpus", 8, "--profile", path)
    path.write_text("{")
    assert "profile.json: is not JSON" in refused("simulate", "--profile", path)
    PROFILE.with_part("latency", {"target": {}}).save(path)
    assert "has no number latency.target.tpot_ms.mean" in refused("plan", "--gpus", 8, "--profile", path)
    assert refused("plan", "--gpus", 8) == "--target-ms is missing: give it, or a --profile that has it"
