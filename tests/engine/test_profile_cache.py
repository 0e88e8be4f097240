"""What is kept of a pair of models between runs."""

import time
from pathlib import Path

import pytest

from dsi.engine import profile_cache
from dsi.engine.profile_cache import (
    MAX_ENTRIES,
    cache_path,
    keep_profile,
    model_identity,
    profile_key,
    read_profile,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_profile_is_kept_and_extended() -> None:
    keep_profile("pair", latency={"target_ms": 7.5})
    keep_profile("pair", acceptance=0.8)
    keep_profile("other", acceptance=0.1)
    kept = read_profile("pair")
    assert (kept["latency"], kept["acceptance"]) == ({"target_ms": 7.5}, 0.8)


def test_profile_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_profile("pair", acceptance=0.8)
    monkeypatch.setattr(profile_cache, "EXPIRES_SECONDS", 0)
    assert read_profile("pair") == {}


def test_profile_of_a_broken_file_is_empty() -> None:
    keep_profile("pair", acceptance=0.8)
    for content in ("{", "[]", '{"pair": 3}', '{"pair": {"time": "now"}}'):
        cache_path().write_text(content)
        assert read_profile("pair") == {}
    keep_profile("pair", acceptance=0.7)
    assert read_profile("pair")["acceptance"] == 0.7


def test_profile_is_not_kept_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "dsi").write_text("no folder")
    keep_profile("pair", acceptance=0.8)
    assert read_profile("pair") == {}


def test_profile_key_depends_on_the_files_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    before = profile_key(model_identity(str(tmp_path)), "float32")
    assert before == profile_key(model_identity(str(tmp_path)), "float32")
    assert before != profile_key(model_identity(str(tmp_path)), "bfloat16")
    (tmp_path / "weights").write_text("22")
    assert before != profile_key(model_identity(str(tmp_path)), "float32")


def test_keep_profile_takes_what_expires_first(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_profile("pair", acceptance=0.8)
    keep_profile("pair", 600, latency=1)
    keep_profile("pair", acceptance=0.7)
    later = time.time() + 601
    assert read_profile("pair").keys() >= {"acceptance", "latency"}
    monkeypatch.setattr(time, "time", lambda: later)
    assert read_profile("pair") == {}


def test_keep_profile_keeps_the_entry_that_it_adds_to_however_many_there_are() -> None:
    for number in range(MAX_ENTRIES + 1):
        keep_profile(str(number), acceptance=0.5)
    keep_profile("pair", 600, latency=1)
    assert read_profile("pair")["latency"] == 1
    assert read_profile("1") == {}
