"""What commands say about an engine and its models."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsi.cli.engine import context_notes, load_engine
from dsi.core.spec import SpecConfig
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.fleets.memory import MemoryUse

DEPLOYMENT: Any = SimpleNamespace(context=96, drafter_contexts={"drafter": 32, "drafter-2": 0})
ENDS = "the text ends at the target's context of 96 tokens"


@pytest.mark.parametrize(
    ("total", "printed"), [(999.0, ""), (2400.4, "dsi: memory: 2400 MiB in 3 processes, 1500 MiB of it shared\n")]
)
def test_load_engine_reports_the_memory_of_large_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], total: float, printed: str
) -> None:
    def load(config: EngineConfig, *, status: Any, **_: object) -> Any:
        status(f"loading {config.target}")
        return SimpleNamespace(deployment=SimpleNamespace(warnings=(), plans={}), algorithm="auto")

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr("dsi.cli.engine.engine_memory", lambda _: MemoryUse(total, 1500.0, 3))
    load_engine(EngineConfig(), SpecConfig())
    assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize(
    ("prompt", "tokens", "reason", "algorithm", "notes"),
    [
        (10, 86, "length", "dsi", ["the text goes on without the drafter after 23 tokens, at its context of 32", ENDS]),
        (50, 46, "length", "si", ["the text goes on without the drafter after 0 tokens, at its context of 32", ENDS]),
        (10, 86, "length", "nonsi", [ENDS]),
        (10, 23, "stop", "dsi", []),
        (10, 24, "stop", "dsi", ["the text goes on without the drafter after 23 tokens, at its context of 32"]),
        (10, 86, "stop", "nonsi", []),
    ],
)
def test_context_notes_say_where_a_context_ended(
    prompt: int, tokens: int, reason: str, algorithm: str, notes: list[str]
) -> None:
    completion: Any = SimpleNamespace(prompt=(1,) * prompt, tokens=(1,) * tokens, finish_reason=reason)
    assert list(context_notes(DEPLOYMENT, SpecConfig(algorithm), completion, 100)) == notes


def test_context_notes_are_silent_at_the_length_asked_for() -> None:
    completion: Any = SimpleNamespace(prompt=(1,), tokens=(1,) * 20, finish_reason="length")
    assert list(context_notes(DEPLOYMENT, SpecConfig(), completion, 20)) == []
