"""Figures that are kept: complete or not at all, of one pair and one dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsi.experiments.profile import NUMBERS, Profile

PACE = {"ttft_ms": {"mean": 30.0}, "tpot_ms": {"mean": 20.0}}
LATENCY = {"target": PACE, "drafter": {"ttft_ms": {"mean": 3.0}, "tpot_ms": {"mean": 2}}, "per_token_ms": 0.5}
EMPTY = Profile("big", "small", "stories")
FULL = EMPTY.with_part("latency", LATENCY).with_part("acceptance", {"rate": 0.8})


def test_profile_load_returns_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    FULL.save(path)
    assert Profile.load(path) == FULL
    assert json.loads(path.read_text())["label"] == "measured"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_profile_with_part_keeps_the_other_part(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    EMPTY.beside(path).with_part("latency", LATENCY).save(path)
    for rate in (0.7, 0.8):
        EMPTY.beside(path).with_part("acceptance", {"rate": rate}).save(path)
    assert Profile.load(path) == FULL


def test_profile_numbers_for_other_commands() -> None:
    assert [FULL.number(name) for name in NUMBERS] == [20, 2, 30, 3, 0.5, 0.8]


@pytest.mark.parametrize(
    "value", [None, "fast", True, float("nan"), float("inf"), {"mean": 1}], ids=lambda value: repr(value)
)
def test_profile_number_names_what_is_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a.json: has no number acceptance.rate, which `dsi measure acceptance"):
        FULL.with_part("acceptance", {"rate": value}).number("acceptance", "a.json")
    with pytest.raises(ValueError, match=r"has no number latency\.target\.tpot_ms\.mean"):
        EMPTY.with_part("latency", value).number("target_ms")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not JSON"),
        ('{"target": "big"', "is not JSON"),
        ("[]", "has no field target"),
        ('{"target": "big", "drafter": 3}', "has no field drafter"),
        ('{"target": "big", "drafter": "small"}', "has no field dataset"),
    ],
)
def test_profile_load_refuses_other_files(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    for use in (Profile.load, EMPTY.beside):
        with pytest.raises(ValueError, match=rf"a\.json: {sentence}"):
            use(path)
    assert path.read_text() == text


def test_profile_beside_refuses_another_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    FULL.save(path)
    for other in (Profile("huge", "small", "stories"), Profile("big", "small", "news")):
        with pytest.raises(ValueError, match="is a profile of target big, drafter small, dataset stories, not of"):
            other.beside(path)
    with pytest.raises(ValueError, match=r"none\.json: cannot be read \(No such file or directory\)"):
        Profile.load(tmp_path / "none.json")


def test_profile_save_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    FULL.save(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        FULL.with_part("latency", {"per_token_ms": float("nan")}).save(path)
    assert Profile.load(path) == FULL
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


CURVE = {
    "target": {"tpot_ms": {"mean": 8.0}},
    "curve": [{"new_tokens": 1, "ms": 8.0}, {"new_tokens": 4, "ms": 9.5}],
}


def test_profile_gives_forwards_by_width() -> None:
    assert Profile("a", "b", "c", {"latency": CURVE}).by_width() == ((1, 8.0), (4, 9.5))
    assert Profile("a", "b", "c", {"latency": {**CURVE, "curve": []}}).by_width() == ((1, 8.0),)
    with pytest.raises(ValueError, match=r"file: latency\.curve must be"):
        Profile("a", "b", "c", {"latency": {**CURVE, "curve": [{"ms": 1}]}}).by_width("file")


def test_profile_gives_chances_by_rank_where_they_were_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    EMPTY.with_part("acceptance", {"rate": 0.8, "chances": (0.8, 0.1, 0.04)}).save(path)
    assert Profile.load(path).chances() == (0.8, 0.1, 0.04)
    assert (FULL.chances(), EMPTY.chances()) == ((), ())  # written before they were counted, or not measured


def test_profile_gives_acceptance_by_rule_where_it_was_measured() -> None:
    results = [
        {"rule": "match", "temperature": 0.0, "places": {"mean": 0.9}},
        {"rule": "match", "temperature": 1.0, "places": {"mean": 0.6}},
        {"rule": "reject", "temperature": 1.0, "places": {"mean": 0.7}},
        {"rule": "block", "temperature": 1.0, "places": None},
    ]
    assert Profile("a", "b", "c", {"rules": {"results": results}}).acceptance_by_rule() == {"match": 0.6, "reject": 0.7}
    assert Profile("a", "b", "c", {"acceptance": {"rate": 0.8}}).acceptance_by_rule() == {"match": 0.8}
