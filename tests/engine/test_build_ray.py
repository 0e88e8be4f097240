"""The built-in pair on a Ray cluster: the same texts as on this machine alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsi import Engine
from dsi.core.spec import SpecConfig
from dsi.engine.build_ray import ModelSpec, load_translator, own_devices, scale_resources
from dsi.fleets.ray_actors import ResourceRequest
from dsi.models.protocol import SamplingModel
from dsi.models.vocab.slem import SLEM
from dsi.models.vocab.tli import TLI
from sample_tokenizers import llama, sample_tokenizer

pytest.importorskip("ray")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROMPTS = ("Once upon a time", "Tom and his dog")
LITTLE = {"target": ResourceRequest(cpus=0.1), "drafter": ResourceRequest(cpus=0.1)}


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[tuple[str, float], tuple[int, ...]]]:
    with Engine.load(algorithm="nonsi") as engine:
        yield {
            (prompt, heat): engine.generate(prompt, max_new_tokens=48, temperature=heat, seed=3).tokens
            for prompt in PROMPTS
            for heat in (0.0, 0.9)
        }


def test_ray_engine_writes_the_targets_text_despite_deaths(
    cluster: None,  # noqa: ARG001
    expected: dict[tuple[str, float], tuple[int, ...]],
) -> None:
    with Engine.load(sp=3, fleet="ray", resources=LITTLE) as engine:
        for (prompt, heat), tokens in expected.items():
            for algorithm in ("nonsi", "si", "dsi"):
                options = {"max_new_tokens": 48, "temperature": heat, "seed": 3, "algorithm": algorithm}
                assert engine.generate(prompt, **options).tokens == tokens
        assert tokens_despite_a_death(engine) == expected[PROMPTS[0], 0.0]


def test_ray_engine_with_trees_writes_the_text_of_nonsi(
    cluster: None,  # noqa: ARG001
    expected: dict[tuple[str, float], tuple[int, ...]],
) -> None:
    specs = (
        SpecConfig("si", 4, tree=8),
        SpecConfig("pearl", 3, tree=6),
        SpecConfig("dsi", 2, tree=8),
        SpecConfig("auto"),
    )
    with Engine.load(sp=2, fleet="ray", resources=LITTLE) as engine:
        assert engine.deployment.trees
        assert engine.deployment.latency_table.trees is not None  # which auto chooses from
        for (prompt, heat), tokens in expected.items():
            for spec in specs:
                done = engine.generate(prompt, max_new_tokens=48, temperature=heat, seed=3, spec=spec)
                assert (done.tokens, done.tally.failed) == (tokens, 0)
                assert done.tally.accepted > 0 or not spec.tree


def tokens_despite_a_death(engine: Engine) -> tuple[int, ...]:
    """Kill a target while it writes; with one target, it has to come back."""
    writing = engine.stream(PROMPTS[0], max_new_tokens=48)
    for i, _ in enumerate(writing):
        if i == 1:
            engine.deployment.fleet.kill("target-1")
    return writing.completion.tokens


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter that has another vocabulary than the built-in target."""
    place = tmp_path_factory.mktemp("characters")
    llama("characters").save_pretrained(place)
    sample_tokenizer("characters").save_pretrained(place)
    return str(place)


def test_ray_engine_takes_a_drafter_with_another_vocabulary(
    cluster: None,  # noqa: ARG001
    expected: dict[tuple[str, float], tuple[int, ...]],
    stranger: str,
) -> None:
    with Engine.load(drafter=stranger, lookahead=2, fleet="ray", resources=LITTLE) as engine:
        assert engine.deployment.context == 512  # the target's: the drafter reads the end of a longer text
        for heat in (0.0, 0.9):
            done = engine.generate(PROMPTS[0], max_new_tokens=48, temperature=heat, seed=3)
            assert done.tokens == expected[PROMPTS[0], heat]
            assert (done.tally.failed, done.tally.drafted > 0) == (0, True)
        assert (engine.deployment.sp, engine.deployment.trees) == (1, False)
        assert tokens_despite_a_death(engine) == expected[PROMPTS[0], 0.0]


def test_load_translator_uses_the_given_method(stranger: str) -> None:
    threads = torch.get_num_threads()
    by_token, by_text = (load_translator(ModelSpec(stranger, "drafter"), "builtin", vocab) for vocab in ("tli", "slem"))
    torch.set_num_threads(threads)
    assert isinstance(by_token, SamplingModel)
    assert isinstance(by_token.backend, TLI)
    assert isinstance(by_text, SLEM)
    with pytest.raises(ValueError, match=r"has another vocabulary \(49 tokens\) than the target builtin"):
        Engine.load(drafter=stranger, fleet="ray", vocab="same")


@pytest.fixture(scope="module")
def split(cluster: None) -> Iterator[Engine]:  # noqa: ARG001
    with Engine.load(target_mp=2, fleet="ray", resources=LITTLE, hang_seconds=4) as engine:
        yield engine


@pytest.mark.parametrize("algorithm", ["nonsi", "si", "dsi"])
def test_ray_engine_splits_a_target(
    split: Engine, expected: dict[tuple[str, float], tuple[int, ...]], algorithm: str
) -> None:
    for heat in (0.0, 0.9):
        options: dict[str, Any] = {"max_new_tokens": 48, "temperature": heat, "seed": 3}
        tokens = split.generate(PROMPTS[1], algorithm=algorithm, **options).tokens
        assert tokens == expected[PROMPTS[1], heat]


def family(engine: Engine) -> list[int]:
    """The process of the target's actor, and those it has started."""
    from ray._private.state import actors

    process = actors(engine.fleet._workers["target-1"].actor._actor_id.hex())["Pid"]  # type: ignore[attr-defined]
    tasks = Path(f"/proc/{process}/task").glob("*/children")  # any thread may have started one
    return [process, *(int(child) for task in tasks for child in task.read_text().split())]


def lives(process: int) -> bool:
    """One that is dead and not yet asked after does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("rank", "fate"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_ray_engine_restarts_a_split_target_when_a_rank_dies_or_hangs(
    split: Engine, expected: dict[tuple[str, float], tuple[int, ...]], rank: int, fate: int
) -> None:
    split.generate(PROMPTS[0], max_new_tokens=1)  # it has its kin
    before, deaths = family(split), split.fleet.deaths.get("target-1", 0)  # type: ignore[attr-defined]
    assert len(before) == 2
    # Plainly, or the text may be written by the time that the target is needed again.
    writing = split.stream(PROMPTS[0], max_new_tokens=48, spec=SpecConfig("nonsi"))
    for i, _ in enumerate(writing):
        if i == 1:
            os.kill(before[rank], fate)
    assert writing.completion.tokens == expected[PROMPTS[0], 0.0]
    assert split.fleet.deaths["target-1"] > deaths  # type: ignore[attr-defined]
    after = family(split)
    assert (len(after), set(after) & set(before)) == (2, set())
    end = time.monotonic() + 20
    while any(map(lives, before)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_scale_resources_counts_the_cpus_of_each_rank() -> None:
    assert scale_resources({}, 3) == {"target": ResourceRequest(cpus=3)}
    asked = {
        "target": ResourceRequest(cpus=2),
        "target-2": ResourceRequest(cpus=1),
        "drafter": ResourceRequest(gpus=1),
    }
    parts = {
        "target": ResourceRequest(cpus=4),
        "target-2": ResourceRequest(cpus=2),
        "drafter": ResourceRequest(gpus=1),
    }
    assert (scale_resources(asked, 1), scale_resources(asked, 2)) == (asked, parts)


def test_own_devices_are_the_gpus_a_server_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_devices(2) == ["cpu"] or torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [own_devices(gpus) for gpus in (0, 1, 2)] == [["cpu"], ["cuda:0"], ["cuda:0", "cuda:1"]]


def test_generate_runs_on_a_new_cluster() -> None:
    command = [sys.executable, "-m", "dsi", "generate", PROMPTS[0], "--max-new-tokens", "8", "--fleet", "ray"]
    command += ["--target-mp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ", there was a little girl named Lily\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target_devices": "cpu,cpu"}, "takes no devices"),
        ({"vocab": "magic"}, "^vocab 'magic': must be"),
        ({"drafter": "nowhere/at/all"}, "^nowhere/at/all: there is no such model folder$"),
        ({"drafter": str(HERE)}, f"^{HERE}: there is no such model, or no tokenizer with it$"),
        ({"hang_seconds": 0.0}, "^hang seconds 0: must be above 0$"),
        ({"start_seconds": float("nan")}, "^start seconds nan: must be above 0$"),
        ({"start_seconds": 0.001}, r"^target-1, drafter: not there after 0\.001 s; the cluster has"),
        ({"target_mp": 0}, "^target mp 0: must be at least 1$"),
        ({"target_mp": 4}, "^target mp 4: does not divide the model's 6 heads$"),
        (
            {"target_mp": 2, "needs": {"target": ResourceRequest(gpus=1)}},
            "target mp 2: .* CPUs alone, .* 1 GPUs",
        ),
    ],
)
def test_ray_engine_refuses_bad_options(
    cluster: None,  # noqa: ARG001
    options: dict[str, Any],
    sentence: str,
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Engine.load(fleet="ray", **options)
