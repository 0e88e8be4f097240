"""The built-in pair on a Ray cluster: the same texts as on this machine alone."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from dsi import Engine
from dsi.clustered import address_of
from dsi.fleets.actors import Needs

pytest.importorskip("ray")

PROMPTS = ("Once upon a time", "Tom and his dog")
LITTLE = {"target": Needs(cpus=0.1), "drafter": Needs(cpus=0.1)}


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[tuple[str, float], tuple[int, ...]]]:
    with Engine.load(algorithm="nonsi") as engine:
        yield {
            (prompt, heat): engine.generate(prompt, max_new_tokens=48, temperature=heat, seed=3).tokens
            for prompt in PROMPTS
            for heat in (0.0, 0.9)
        }


@pytest.mark.parametrize("sp", [1, 2, 3])
def test_the_text_is_the_targets_own_whatever_dies(
    cluster: None,  # noqa: ARG001
    expected: dict[tuple[str, float], tuple[int, ...]],
    sp: int,
) -> None:
    with Engine.load(sp=sp, fleet="ray", needs=LITTLE) as engine:
        for (prompt, heat), tokens in expected.items():
            for algorithm in ("nonsi", "si", "dsi"):
                options = {"max_new_tokens": 48, "temperature": heat, "seed": 3, "algorithm": algorithm}
                assert engine.generate(prompt, **options).tokens == tokens
        prompt, heat = PROMPTS[0], 0.0
        writing = engine.stream(prompt, max_new_tokens=48)
        for i, _ in enumerate(writing):
            if i == 1:
                engine.loaded.fleet.kill("target-1")
        assert writing.completion.tokens == expected[prompt, heat]


def test_the_command_runs_on_a_cluster_of_its_own() -> None:
    command = [sys.executable, "-m", "dsi", "generate", PROMPTS[0], "--max-new-tokens", "8", "--fleet", "ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ", there was a little girl named Lily\n")


@pytest.mark.parametrize("fleet", ["roy", "ray=", "", "rays=1"])
def test_a_fleet_that_is_none_is_refused(fleet: str) -> None:
    with pytest.raises(ValueError, match="must be ray, or ray=ADDRESS"):
        address_of(fleet)


def test_what_cannot_be_on_a_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no devices"):
        Engine.load(fleet="ray", target_devices="cpu,cpu")
    with pytest.raises(ValueError, match="must have the target's vocabulary"):
        Engine.load(fleet="ray", vocab="slem")
