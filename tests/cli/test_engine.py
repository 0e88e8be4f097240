"""What is printed while an engine loads."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsi.cli.engine import load_engine
from dsi.core.spec import SpecConfig
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.fleets.memory import MemoryUse


@pytest.mark.parametrize(
    ("total", "printed"), [(999.0, ""), (2400.4, "dsi: memory: 2400 MiB in 3 processes, 1500 MiB of it shared\n")]
)
def test_load_engine_reports_the_memory_of_large_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], total: float, printed: str
) -> None:
    def load(config: EngineConfig, *, status: Any, **_: object) -> Any:
        status(f"loading {config.target}")
        return SimpleNamespace(deployment=SimpleNamespace(warnings=(), plans={}))

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr("dsi.cli.engine.engine_memory", lambda _: MemoryUse(total, 1500.0, 3))
    load_engine(EngineConfig(), SpecConfig())
    assert capsys.readouterr() == ("", printed)
