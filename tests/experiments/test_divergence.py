"""Texts that part: where, by what margin, and what `dsi compare` makes of it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from command import dsi_here
from dsi.cli import compare as command
from dsi.core.policies import autoregressive, distributed
from dsi.core.request import Completion, Request
from dsi.core.spec import SpecConfig
from dsi.engine.engine import Engine
from dsi.experiments.compare import compare
from dsi.experiments.divergence import Divergence, first_difference
from dsi.fleets.loop import EngineLoop
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

PROMPTS = ["one", "four"]
OTHER = 63  # an odd token, which the toy target never outputs
DIVERGENCE = Divergence("one", "non-SI", ("DSI",), 5, 0.25)


class FakeEngine:
    """Runs in virtual time; DSI's text of one prompt has another token at position 5, as if it had been rounded."""

    def __init__(self, wrong: str = "one", plans: dict[str, Any] | None = None) -> None:
        self.wrong, self.deployment = wrong, SimpleNamespace(plans=plans or {}, exact=False)
        self.margins: list[tuple[int, ...]] = []  # the texts after which a margin was asked for

    def generate(self, prompt: str | tuple[int, ...], *, algorithm: str, max_new_tokens: int, **options: Any) -> Any:
        if options.get("logprobs"):
            self.margins.append(cast(tuple[int, ...], prompt))
            return SimpleNamespace(top_logprobs=(((3, -0.5), (4, -0.75)),))
        policy = autoregressive() if algorithm == "nonsi" else distributed(1)
        tokens = (len(prompt), 2)
        fleet = SimulationConfig(LatencyModel(20, 2), 1.0, 2, max_new_tokens).simulated(0)
        [done] = EngineLoop(fleet).run(Request(tokens, max_new_tokens, policy))
        done = replace(done, prompt=tokens)
        return self._rounded(done) if (algorithm, prompt) == ("dsi", self.wrong) else done

    def _rounded(self, done: Completion) -> Completion:
        return replace(done, tokens=(*done.tokens[:5], OTHER, *done.tokens[6:]))


def compared(engine: FakeEngine, repeats: int = 2) -> Any:
    specs = [SpecConfig("nonsi"), SpecConfig("dsi")]
    return compare(cast(Engine, engine), specs, PROMPTS, repeats, {"max_new_tokens": 9})


def test_compare_keeps_the_figures_of_texts_that_part() -> None:
    engine = FakeEngine()
    comparison = compared(engine)
    assert comparison.divergences == [DIVERGENCE]
    assert [(row.algorithm, row.runs) for row in comparison.rows] == [("nonsi", 4), ("dsi", 4)]
    [text] = engine.margins
    assert (text[:2], len(text)) == ((3, 2), 7)


def test_compare_finds_no_divergence_in_equal_texts() -> None:
    assert compared(FakeEngine(wrong="")).divergences == []


def test_compare_knows_no_margin_on_devices() -> None:
    [found] = compared(FakeEngine(plans={"dsi": None})).divergences
    assert (found.position, found.margin) == (5, None)
    assert str(found).endswith("which part after 5 tokens")


@pytest.mark.parametrize(
    ("a", "b", "position"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (4,), 0)]
)
def test_first_difference_of_two_texts(a: tuple[int, ...], b: tuple[int, ...], position: int | None) -> None:
    assert first_difference(a, b) == position


SENTENCE = (
    "prompt 'one': different texts were written by non-SI and DSI, which part after 5 tokens, where the target's "
    "likeliest token leads by 0.2500 nats"
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(command, "load_engine", lambda *_: nullcontext(fake))
    monkeypatch.setattr(command, "_prompts", lambda _: PROMPTS)
    return fake


QUICK = ("compare", "--algorithm", "nonsi,dsi", "--max-new-tokens", "9", "--repeats", "1")


def test_compare_reports_where_bfloat16_texts_part(engine: FakeEngine) -> None:
    done = dsi_here(*QUICK, "--dtype", "bfloat16")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, SENTENCE)
    assert "measured: 2 texts each, those of 1 prompt not equal" in done.stdout
    result = json.loads(dsi_here(*QUICK, "--dtype", "bfloat16", "--json").stdout)
    assert (result["equal"], len(result["results"])) == (False, 2)
    [found] = result["divergences"]
    assert (found["prompt"], found["names"], found["position"], found["margin"]) == ("one", ["DSI"], 5, 0.25)
    engine.wrong = ""
    result = json.loads(dsi_here(*QUICK, "--dtype", "bfloat16", "--json").stdout)
    assert (result["equal"], result["divergences"]) == (True, [])


def test_compare_fails_where_texts_of_exact_forwards_part(engine: FakeEngine) -> None:
    engine.deployment.exact = True
    done = dsi_here(*QUICK, "--dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (2, f"dsi: {SENTENCE}\n")


@pytest.mark.usefixtures("engine")
def test_compare_fails_where_float32_texts_part_and_prints_the_figures() -> None:
    done = dsi_here(*QUICK)
    assert (done.returncode, done.stderr) == (2, f"dsi: {SENTENCE}\n")
    assert "tokens per second" in done.stdout
