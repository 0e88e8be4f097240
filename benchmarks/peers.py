"""Our engine beside llama.cpp's server and transformers' own `generate`, plain and with a drafter. Measured.

One run, interleaved: each prompt goes through every row before the next one. Our rows have one core for the drafter
and the others for the target, or, where they say so, all cores for each forward; transformers has all cores, and
llama.cpp one or all of them (its own times, without HTTP; `--rows` leaves it out where it cannot be installed).
Our greedy texts in float32 are checked to be equal, and everybody's are compared with ours. `--check` exits with status
1 unless `auto` is first in every class of prompts, or within 3% of the first. `--quick` for a first look.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.engine.build import silence_transformers
from dsi.engine.config import DTYPES
from dsi.engine.engine import Engine
from dsi.experiments.compare import CLASSES
from dsi.models.names import NGRAM, model_path
from llama_cpp import LlamaCpp, gguf

AUTO, DSI, PLAIN, ASSISTED = "auto", "dsi", "transformers plain", "transformers assisted"
OWN_CORES = {name: SpecConfig(name) for name in (AUTO, DSI, "pearl", "nonsi")} | {
    f"si {lookahead}": SpecConfig("si", lookahead) for lookahead in (3, 5, 8)
}
TREES = {f"si tree {size}": SpecConfig("si", depth, tree=size) for size, depth in ((4, 3), (8, 4))}
ALL_CORES = {f"{name} all cores": OWN_CORES[name] for name in ("nonsi", "si 3", "si 5")}
LLAMA_CPP = {  # threads for each core of the pair's, and draft tokens
    "llama.cpp 1 thread": (False, 0),
    "llama.cpp": (True, 0),
    "llama.cpp draft 5": (True, 5),
    "llama.cpp draft 10": (True, 10),
}
OURS = (*OWN_CORES, *TREES, *ALL_CORES)
ROWS = (*OURS, *LLAMA_CPP, ASSISTED, PLAIN)
TOLERANCE = 0.03  # by which `auto` may be slower than the fastest row
LOOKUP_TOKENS = 10  # draft tokens of transformers' prompt lookup, as its documentation has it

Round = tuple[str, Tokens]  # the class of a prompt, and its tokens
Rates = Mapping[str, Sequence[float]]  # tokens per second of each round, by row


@dataclass(frozen=True)
class Text:
    tokens: Tokens
    seconds: float
    ttft: float
    target_seconds: float = 0.0  # that our first target computed

    @property
    def rate(self) -> float:
        return len(self.tokens) / self.seconds


Write = Callable[[Round], Text]


class FirstToken:
    """A streamer for transformers' `generate` that notes when tokens come; the prompt is put first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def ours(engine: Engine, spec: SpecConfig, tokens: int) -> Write:
    def write(item: Round) -> Text:
        before = engine.deployment.fleet.busy["target-1"]
        done = engine.generate(item[1], max_new_tokens=tokens, spec=spec)
        busy = engine.deployment.fleet.busy["target-1"] - before
        return Text(done.tokens, float(done.elapsed), float(done.ttft), float(busy))

    return write


class Transformers:
    """transformers' `generate` in this process, with all cores."""

    def __init__(self, options: argparse.Namespace, tokenizer: Any) -> None:
        self.threads, self.tokens, self.dtype = options.cores, options.tokens, getattr(torch, options.dtype)
        self.target = self._load(model_path(options.target, "target"))
        self.assistance = self._assistance(options.drafter, tokenizer)

    def _load(self, path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).eval()

    def _assistance(self, drafter: str, tokenizer: Any) -> dict[str, Any]:
        if drafter == NGRAM:
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        path = model_path(drafter, "drafter")
        own = AutoTokenizer.from_pretrained(path)
        same = own.get_vocab() == tokenizer.get_vocab()
        tokenizers = {} if same else {"tokenizer": tokenizer, "assistant_tokenizer": own}
        return {"assistant_model": self._load(path), **tokenizers}

    def row(self, assisted: bool) -> Write:
        options = {"do_sample": False, "max_new_tokens": self.tokens, **(self.assistance if assisted else {})}

        def write(item: Round) -> Text:
            torch.set_num_threads(self.threads)
            ids, streamer = torch.tensor([item[1]]), FirstToken()
            mask, began = torch.ones_like(ids), perf_counter()
            output = self.target.generate(ids, attention_mask=mask, streamer=streamer, **options)
            seconds = perf_counter() - began
            torch.set_num_threads(1)  # as our engine has it: its threads would wait for cores beside ours
            return Text(tuple(output[0, ids.shape[1] :].tolist()), seconds, streamer.times[1] - began)

        return write


def llama_cpp_rows(options: argparse.Namespace, eos: int, servers: ExitStack) -> dict[str, Write]:
    rows: dict[str, Write] = {}
    for name, (all_cores, guesses) in LLAMA_CPP.items():
        if name not in options.rows:
            continue
        target = gguf(model_path(options.target, "target"), options.dtype)
        draft = NGRAM if options.drafter == NGRAM else gguf(model_path(options.drafter, "drafter"), options.dtype)
        server = LlamaCpp(target, eos, options.cores if all_cores else 1, draft if guesses else "", guesses)
        rows[name] = llama_cpp_row(servers.enter_context(server), options.tokens)
    return rows


def llama_cpp_row(server: LlamaCpp, tokens: int) -> Write:
    def write(item: Round) -> Text:
        return Text(*server.generate(item[1], tokens))

    return write


def make_rows(options: argparse.Namespace, tokenizer: Any, engines: ExitStack) -> dict[str, Write]:
    """Load what the chosen rows need: processes are forked before transformers starts threads here."""
    pair = {"target": options.target, "drafter": options.drafter, "dtype": options.dtype}
    rows: dict[str, Write] = {}
    for specs, threads in ((OWN_CORES | TREES, None), (ALL_CORES, options.cores)):
        if chosen := [name for name in specs if name in options.rows]:
            engine = engines.enter_context(Engine.load(**pair, threads=threads))
            rows |= {name: ours(engine, specs[name], options.tokens) for name in chosen}
    rows |= llama_cpp_rows(options, tokenizer.eos_token_id, engines)
    if chosen := [name for name in (ASSISTED, PLAIN) if name in options.rows]:
        theirs = Transformers(options, tokenizer)
        rows |= {name: theirs.row(name == ASSISTED) for name in chosen}
    return rows


def by_class(texts: Mapping[str, Sequence[Text]], rounds: Sequence[Round]) -> dict[str, dict[str, list[Text]]]:
    """Split each row's texts, which come in the order of the rounds again and again, by class of prompt."""
    classes = dict.fromkeys(name for name, _ in rounds)
    return {
        chosen: {
            row: [text for i, text in enumerate(done) if rounds[i % len(rounds)][0] == chosen]
            for row, done in texts.items()
        }
        for chosen in classes
    }


def verdict(rates: Rates) -> tuple[str, float]:
    """Return the fastest row beside `auto`, and the speed of `auto` over it: the median within prompts and repeats."""
    over = {name: median(harness.ratios(rates[AUTO], row)) for name, row in rates.items() if name != AUTO}
    rival = min(over, key=lambda name: over[name])
    return rival, over[rival]


def over_llama_cpp(classes: Mapping[str, Rates]) -> dict[str, float]:
    """The speed of `auto` over that of llama.cpp's fastest row, by class of prompt, and in all of them together."""
    every = {row: [rate for rates in classes.values() for rate in rates[row]] for row in next(iter(classes.values()))}
    if AUTO not in every or not any(row in LLAMA_CPP for row in every):
        return {}
    return {
        name: min(median(harness.ratios(rates[AUTO], rates[row])) for row in rates if row in LLAMA_CPP)
        for name, rates in {**classes, "all": every}.items()
    }


def holds(ratio: float) -> bool:
    return ratio >= 1 - TOLERANCE


def of_the_fastest(rates: Rates) -> dict[str, list[float]]:
    """Return each row's speed as a share of the fastest row's within a prompt and repeat."""
    fastest = [max(row) for row in zip(*rates.values(), strict=True)]
    return {name: harness.ratios(row, fastest) for name, row in rates.items()}


def class_lines(name: str, texts: Mapping[str, Sequence[Text]]) -> Iterator[str]:
    """Lay out the rows of one class of prompts, and say how `auto` did."""
    rates = speeds(texts)
    shares, bases = of_the_fastest(rates), [base for base in (AUTO, DSI) if base in rates]
    yield name
    yield from harness.table(
        ("", "tokens/s (quartiles)", "of the fastest", *(f"{base} over it" for base in bases), "ms to first token"),
        [
            (
                row,
                harness.spread(rates[row], 1),
                f"{median(shares[row]):.2f}",
                *(f"{median(harness.ratios(rates[base], rates[row])):.2f}" for base in bases),
                harness.spread([1000 * text.ttft for text in done], 1),
            )
            for row, done in texts.items()
        ],
    )
    if can_judge(rates):
        rival, ratio = verdict(rates)
        place = "first" if ratio >= 1 else f"within {TOLERANCE:.0%} of the first" if holds(ratio) else "behind"
        yield f"auto is {place}: {ratio:.3f} times as fast as {rival}"
    yield ""


def speeds(texts: Mapping[str, Sequence[Text]]) -> dict[str, list[float]]:
    return {row: [text.rate for text in done] for row, done in texts.items()}


def can_judge(rows: Collection[str]) -> bool:
    return AUTO in rows and len(rows) > 1


def equal_rounds(texts: Mapping[str, Sequence[Text]]) -> int:
    """Return in how many rounds all rows generated one text."""
    rounds = [{text.tokens for text in row} for row in zip(*texts.values(), strict=True)]
    return sum(len(different) == 1 for different in rounds)


def other_texts(texts: Mapping[str, Sequence[Text]]) -> dict[str, int]:
    """Count the rounds in which a row's text is not that of our first row; rows without any are left out."""
    own = next((texts[row] for row in texts if row in OURS), ())
    counts = {
        row: sum(a.tokens != b.tokens for a, b in zip(done, own, strict=True)) for row, done in texts.items() if own
    }
    return {row: count for row, count in counts.items() if count}


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "--quick", repeats=3, tokens=96, cores=2)
    parser.add_argument("--target", default="builtin", help="a model folder, or builtin")
    parser.add_argument("--drafter", default="builtin", help="a smaller model, or ngram")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--classes", type=harness.names(*CLASSES), default=list(CLASSES), help=", ".join(CLASSES))
    parser.add_argument("--rows", type=harness.names(*ROWS), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--check", action="store_true", help="exit status 1 where auto is too slow")
    parser.add_argument("--quick", action="store_true", help="one repeat of 32 tokens, two prompts of each class")
    options = parser.parse_args()
    if options.check and not can_judge(options.rows):
        parser.error(f"--check with --rows {','.join(options.rows)}: needs {AUTO} and another row")
    if options.cores > (available := len(os.sched_getaffinity(0))):
        parser.error(f"--cores {options.cores}: this machine has {available}")
    if options.drafter == NGRAM:  # which has one choice
        options.rows = [row for row in options.rows if row not in TREES]
    if options.quick:
        options.repeats, options.tokens = 1, 32
    return options


def run(options: argparse.Namespace) -> tuple[dict[str, dict[str, list[Text]]], dict[str, int]]:
    """Return the texts by class of prompt and row, and how many texts of which rows are not ours."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(options.target, "target"))
    count = 2 if options.quick else None
    rounds = [(name, tuple(tokenizer(text)["input_ids"])) for name in options.classes for text in CLASSES[name][:count]]
    with ExitStack() as engines:
        rows = make_rows(options, tokenizer, engines)
        texts = harness.interleave(rows, rounds, options.repeats, warm_up=1)
    others = other_texts(texts)
    if options.dtype == DTYPES[0] and (wrong := [row for row in others if row in OURS]):
        harness.fail(f"different texts of ours in float32: {', '.join(wrong)}")
    return by_class(texts, rounds), others


def main() -> None:
    options = parse()
    silence_transformers()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    classes, others = run(options)
    rates = {name: speeds(rows) for name, rows in classes.items()}
    verdicts = {name: verdict(rows) for name, rows in rates.items() if can_judge(rows)}
    results: dict[str, Any] = {
        "pair": {"target": options.target, "drafter": options.drafter, "dtype": options.dtype},
        "tokens_per_second": rates,
        "ttft_ms": {n: {row: [1000 * t.ttft for t in done] for row, done in c.items()} for n, c in classes.items()},
        "auto": {name: {"rival": rival, "over_it": ratio} for name, (rival, ratio) in verdicts.items()},
        "over_llama_cpp": over_llama_cpp(rates),
        "texts": sum(len(rows[options.rows[0]]) for rows in rates.values()),
        "other_texts": others,
    }
    notes = [
        f"measured on {options.cores} cores; ratios are medians within a prompt and repeat",
        f"{results['texts']} texts of each row; other texts than ours: {others or 'none'}",
    ]
    if over := results["over_llama_cpp"]:
        notes.append("auto over llama.cpp at its best: " + ", ".join(f"{name} {x:.2f}" for name, x in over.items()))
    if own := [text.seconds / text.target_seconds - 1 for rows in classes.values() for text in rows.get("nonsi", ())]:
        notes.append(f"the engine beyond the target's forwards in plain decoding: {median(own):.1%} of their time")
    lines = [line for name, rows in classes.items() for line in class_lines(name, rows)]
    harness.report(options, "measured", results, [*lines, *notes])
    late = [f"{name} ({ratio:.3f} of {rival})" for name, (rival, ratio) in verdicts.items() if not holds(ratio)]
    if options.check and late:
        harness.fail(f"auto is more than {TOLERANCE:.0%} behind the first: {', '.join(late)}")


if __name__ == "__main__":
    main()
