"""Prompts to measure with: our own, the paper's datasets with its templates, or a file of JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsi.engine.prompts import BUILTIN_PROMPTS

BUILTIN = "builtin"
ENDINGS = (".jsonl", ".jsonl.gz")
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
Row = Mapping[str, Any]
Numbered = tuple[int, object]  # a line's number and its document


@dataclass(frozen=True)
class Template:
    """A function that makes a prompt of a row, and the fields that it needs."""

    fields: tuple[str, ...]
    fill: Callable[[Row], str]


def _mbpp(row: Row) -> str:
    """The quotes belong to the prompt: a docstring is followed by the function that it describes."""
    return f'"""{row["text"]}\n{row["test_list"]}\n"""'


# In the paper's other figures the quotes only hold the text, as in Python: nobody asks for a summary inside a
# docstring, and Alpaca's original prompt has none. The line break before the closing quotes is in the text.
def _cnn_dm(row: Row) -> str:
    return f"Summarize:\n{row['article']}\nSummary:\n"


# The paper breaks Alpaca's first sentences to fit its column; the original, which it follows, does not.
def _alpaca(row: Row) -> str:
    what = "Below is an instruction that describes a task"
    how = "Write a response that appropriately completes the request."
    asked = f"### Instruction:\n{row['instruction']}\n\n"
    if row.get("input"):
        context = ", paired with an input that provides further context"
        return f"{what}{context}. {how}\n\n{asked}### Input:\n{row['input']}\n\n### Response:\n"
    return f"{what}. {how}\n\n{asked}### Response:\n"


def only(field: str) -> Template:
    """Return a template that is the field as it is."""
    return Template((field,), lambda row: str(row[field]))


TEMPLATES = {
    "humaneval": only("prompt"),
    "mbpp": Template(("text", "test_list"), _mbpp),
    "cnn-dm": Template(("article",), _cnn_dm),
    "alpaca": Template(("instruction",), _alpaca),
    "spec-bench": only("turns"),
}
HUB: dict[str, dict[str, str]] = {  # arguments of `datasets.load_dataset`
    "humaneval": {"path": "openai/openai_humaneval", "split": "test"},
    "mbpp": {"path": "google-research-datasets/mbpp", "name": "full", "split": "test"},
    "cnn-dm": {"path": "abisee/cnn_dailymail", "name": "3.0.0", "split": "test"},
    "alpaca": {"path": "tatsu-lab/alpaca", "split": "train"},
    "spec-bench": {"path": "text", "data_files": SPEC_BENCH, "split": "train"},
}


def read(dataset: str, field: str | None = None, template: str | None = None) -> list[str]:
    """Return all prompts of a dataset, given by its name or as a file."""
    if field is not None and template is not None:
        raise ValueError("a field and a template: give one of them")
    if dataset == BUILTIN:
        if form := field or template:
            raise ValueError(f"{form}: the built-in prompts have no fields; a field or template is for a dataset")
        return list(BUILTIN_PROMPTS)
    name = dataset.lower()
    if name in HUB:
        rows = _from_hub(name)
    elif name.endswith(ENDINGS):
        rows = _parsed(_lines(Path(dataset)), dataset)
    else:
        raise ValueError(
            f"dataset {dataset!r}: must be {BUILTIN}, {', '.join(HUB)}, or a file that ends in {' or '.join(ENDINGS)}"
        )
    filling = _template(template or (name if name in HUB and field is None else None), field)
    texts = [_filled(filling, row, f"{dataset}: line {line}") for line, row in rows]
    if not texts:
        raise ValueError(f"{dataset}: has no prompt in it")
    return texts


def _template(name: str | None, field: str | None) -> Template:
    if name is None:
        return only(field or "prompt")
    if name.lower() not in TEMPLATES:
        raise ValueError(f"template {name!r}: must be one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name.lower()]


def _first_item(value: object) -> object:
    """Return the first of a list: the first turn of a conversation, the first of several tests."""
    return value[0] if isinstance(value, list) and value else value


def _filled(template: Template, row: object, where: str) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is not an object with fields")
    texts = {field: _first_item(row.get(field)) for field in template.fields}
    for field, value in texts.items():
        if field not in row:
            raise ValueError(f"{where} has no field {field!r}; its fields are {', '.join(row) or 'none'}")
        if not isinstance(value, str):
            raise ValueError(f"{where}: the field {field!r} is not a text")
    return template.fill({**row, **texts})


def _parsed(lines: Iterable[str], source: object) -> Iterator[Numbered]:
    """Parse the lines that are not empty."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                raise ValueError(f"{source}: line {number} is not JSON") from None


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    return text.split("\n")  # alone: what else Python takes for the end of a line may be inside a text


def _from_hub(name: str) -> Iterator[Numbered]:
    rows = _downloaded(name)
    # Lines of text, because the references of Spec-Bench change their form and fit in no table.
    return _parsed((row["text"] for row in rows), name) if name == "spec-bench" else enumerate(rows, 1)


def _downloaded(name: str) -> list[Row]:
    instead = f"or download it and give the {ENDINGS[0]} file with --template {name}"
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"dataset {name}: needs a library: pip install datasets, {instead}") from None
    try:
        return list(load_dataset(**HUB[name]))
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"dataset {name}: the hub does not give it ({why}); try again, {instead}") from error
