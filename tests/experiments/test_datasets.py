"""Where prompts come from, and what they look like when they arrive."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsi.engine.prompts import BUILTIN_PROMPTS, PromptSample, sample_prompts
from dsi.experiments.datasets import HUB, TEMPLATES, read


def written(path: Path, *rows: object) -> str:
    """A file of JSON lines; what is already text is written as it is."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))


def test_read_builtin_has_fifty_prompts() -> None:
    assert len(set(read("builtin"))) == len(BUILTIN_PROMPTS) == 50


def test_read_applies_the_papers_templates(tmp_path: Path) -> None:
    alpaca = {"instruction": "Add {them}.", "input": "2 3"}
    rows: dict[str, list[tuple[dict[str, Any], str]]] = {
        "humaneval": [({"prompt": "def f():\n", "test": "x"}, "def f():\n")],
        "mbpp": [
            (
                {"text": "Write f.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]},
                '"""Write f.\nassert f(1) == 2\n"""',
            )
        ],
        "cnn-dm": [({"article": "It rained."}, "Summarize:\nIt rained.\nSummary:\n")],
        "alpaca": [
            (
                alpaca,
                "Below is an instruction that describes a task, paired with an input that provides further "
                "context. Write a response that appropriately completes the request.\n\n"
                "### Instruction:\nAdd {them}.\n\n### Input:\n2 3\n\n### Response:\n",
            ),
            (
                alpaca | {"input": ""},
                "Below is an instruction that describes a task. Write a response that appropriately "
                "completes the request.\n\n### Instruction:\nAdd {them}.\n\n### Response:\n",
            ),
        ],
        "spec-bench": [({"turns": ["First?", "Second?"]}, "First?")],
    }
    assert rows.keys() == TEMPLATES.keys() == HUB.keys()
    for name, pairs in rows.items():
        path = written(tmp_path / "rows.jsonl", *(row for row, _ in pairs))
        assert read(path, template=name) == [prompt for _, prompt in pairs]


@pytest.mark.parametrize("name", ["plain.jsonl", "packed.jsonl.gz"])
def test_read_json_lines(tmp_path: Path, name: str) -> None:
    rows = ({"prompt": "one\u2028two", "question": "why?"}, "", {"prompt": "three", "question": "how?"})
    path = written(tmp_path / name, *rows)
    assert read(path) == ["one\u2028two", "three"]
    assert read(path, field="question") == ["why?", "how?"]


def test_read_file_with_a_template(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"turns": ["First?", "Second?"]})
    assert read(path, template="Spec-Bench") == ["First?"]


def test_read_name_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = ModuleType("datasets")
    asked: list[dict[str, str]] = []

    def load_dataset(**options: str) -> list[dict[str, str]]:
        asked.append(options)
        return [{"article": "It rained."}]

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert read("cnn-dm") == ["Summarize:\nIt rained.\nSummary:\n"]
    assert read("CNN-DM", field="article") == ["It rained."]
    assert asked == [{"path": "abisee/cnn_dailymail", "name": "3.0.0", "split": "test"}] * 2


def test_read_spec_bench_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its references are now texts and now lists, which a table of the hub's library cannot hold."""
    hub = ModuleType("datasets")
    lines = [{"turns": ["First?"], "reference": ["a"]}, {"turns": ["Other?"], "reference": [["b"]]}]
    hub.load_dataset = lambda **_: [{"text": json.dumps(line)} for line in lines]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert read("spec-bench") == ["First?", "Other?"]


def test_read_without_library_or_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    sentence = "dataset mbpp: needs a library: pip install datasets, or download it and give"
    with pytest.raises(ValueError, match=sentence):
        read("mbpp")
    hub = ModuleType("datasets")

    def load_dataset(**_: str) -> None:
        raise ConnectionError("no\nnetwork")

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(ValueError, match=r"dataset mbpp: the hub does not give it \(no network\); try again"):
        read("mbpp")


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ((), {}, "has no prompt in it"),
        (("", " "), {}, "has no prompt in it"),
        (
            ({"prompt": "a"}, {"text": "b", "code": "c"}),
            {},
            "line 2 has no field 'prompt'; its fields are text, code",
        ),
        (({},), {}, "line 1 has no field 'prompt'; its fields are none"),
        (
            ({"text": "a", "test_list": []},),
            {"template": "mbpp"},
            "line 1: the field 'test_list' is not a text",
        ),
        (({"prompt": 3},), {}, "line 1: the field 'prompt' is not a text"),
        (({"prompt": "a"}, "{prompt: b}"), {}, "line 2 is not JSON"),
        (("[1, 2]",), {}, "line 1 is not an object with fields"),
        (({"prompt": "a"},), {"template": "haiku"}, "template 'haiku': must be one of humaneval, mbpp"),
        (
            ({"prompt": "a"},),
            {"template": "mbpp", "field": "prompt"},
            "a field and a template: give one of them",
        ),
    ],
)
def test_read_bad_file_is_one_sentence(
    tmp_path: Path, rows: tuple[object, ...], options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=r"a field and|template '|a\.jsonl: ") as refused:
        read(written(tmp_path / "a.jsonl", *rows), **options)
    assert sentence in str(refused.value)


def test_read_bad_name_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not packed")
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:20])
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    for dataset, sentence in (
        (
            "mtbench",
            "dataset 'mtbench': must be builtin, humaneval, mbpp, cnn-dm, alpaca, spec-bench, or a file",
        ),
        (str(tmp_path / "none.jsonl"), "there is no such file"),
        (str(tmp_path / "bad.jsonl.gz"), "cannot be read"),
        (str(tmp_path / "half.jsonl.gz"), "cannot be read"),
        (str(tmp_path / "latin.jsonl"), "cannot be read"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read(dataset)
    with pytest.raises(ValueError, match="the built-in prompts have no fields"):
        read("builtin", field="prompt")


def test_sample_prompts_draws_by_seed_and_skips_long_ones() -> None:
    texts = ["a" * length for length in range(1, 11)]

    def drawn(seed: int, count: int = 4, tokens: int = 5, context: int = 12) -> PromptSample:
        return sample_prompts(texts, Letters(), count, seed, tokens, context)  # type: ignore[arg-type]

    assert drawn(3) == drawn(3) != drawn(4)
    assert all(len(prompt) <= 7 for seed in range(20) for prompt in drawn(seed).prompts)
    assert (len(drawn(0, count=99).prompts), drawn(0, count=99).skipped) == (7, 3)
    assert drawn(0, count=99, context=0).skipped == 0  # a context without bounds
    first = [len(drawn(seed, count=1, context=0).prompts[0]) for seed in range(300)]
    assert min(first.count(length) for length in range(1, 11)) > 10  # of 30 expected
    with pytest.raises(ValueError, match="none of 10 prompts leaves room for 50 tokens in the models' context of 12"):
        drawn(0, tokens=50)
