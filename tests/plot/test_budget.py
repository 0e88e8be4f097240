"""A panel for each class of prompts, a bar for each configuration."""

from pathlib import Path

import pytest
from matplotlib.collections import LineCollection

from dsi.core.generation import Tally
from dsi.core.request import Completion
from dsi.core.spec import SpecConfig
from dsi.experiments.budget import SIMULATED, Configuration, Layout, Table, entries
from dsi.plot.budget import figure
from dsi.plot.style import save


def table(name: str, *speeds: float) -> Table:
    """Texts of one token; times are milliseconds."""
    nonsi, dsi = Configuration(SpecConfig("nonsi"), Layout(2)), Configuration(SpecConfig("dsi"), Layout(2, 1))
    texts = {
        config: [Completion((7,), "length", (ms / speed,), Tally()) for speed in speeds]
        for config, ms in ((nonsi, 1000), (dsi, 500))
    }
    return Table(name, entries(texts, SIMULATED, 1), acceptance=0.75)


TABLES = [table("tales", 10, 20, 30), table("code", 5), table("verse", 4, 8)]


def test_budget_figure_draws_medians_with_quartiles_and_names() -> None:
    picture = figure(TABLES, "Two cores")
    shown = [axes for axes in picture.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown] == [
        f"{name}, acceptance 0.75" for name in ("tales", "code", "verse")
    ]
    assert [bar.get_width() for bar in shown[0].patches] == pytest.approx([20, 40])  # type: ignore[attr-defined]
    names = [label.get_text() for label in shown[0].get_yticklabels()]
    assert names == ["non-SI, all 2 cores", "DSI, 1 target of 1 core"]
    [whiskers] = shown[0].collections
    assert isinstance(whiskers, LineCollection)
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [
        pytest.approx([10, 30]),
        pytest.approx([20, 60]),
    ]
    assert "simulated" in shown[-1].get_xlabel()


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_budget_save_is_reproducible(tmp_path: Path, name: str, begins: bytes) -> None:
    save(figure(TABLES, "Two cores"), tmp_path / name)
    first = (tmp_path / name).read_bytes()
    save(figure(TABLES, "Two cores"), tmp_path / name)
    assert first.startswith(begins)
    assert (tmp_path / name).read_bytes() == first
