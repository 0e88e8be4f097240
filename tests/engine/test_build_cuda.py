"""The engine on devices, here the CPU: the same text as on processes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from command import dsi
from dsi.core.messages import DRAFTER, TARGET, Sampling
from dsi.core.spec import SpecConfig
from dsi.engine import build_cuda
from dsi.engine.build_cuda import (
    CPU_TEXTS,
    are_exact,
    packed_models,
    random_cuda_model,
    running_texts,
    slots_by_role,
    unpacked_warnings,
)
from dsi.engine.deployment import Deployment
from dsi.engine.engine import Engine
from dsi.models.cuda.decoder_triton import has_invariant_rows
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.names import model_path
from dsi.models.protocol import ForwardRequest
from dsi.models.shapes import config, random_model
from dsi.planning.latency import LatencyModel
from dsi.planning.search import DeploymentPlan

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, ...]]:
    with Engine.load() as engine:
        return [engine.generate(PROMPT, max_new_tokens=24, temperature=t, seed=5).tokens for t in (0.0, 0.9)]


@pytest.mark.parametrize(("devices", "sp"), [("cpu,cpu", 1), ("cpu,cpu,cpu,cpu", 3), ("cpu+cpu,cpu", 1)])
def test_devices_do_not_change_the_text(devices: str, sp: int, texts: list[tuple[int, ...]]) -> None:
    with Engine.load(target_devices=devices, sp=sp) as engine:
        assert engine.deployment.sp == sp
        assert (engine.deployment.max_running == 1) == (sp > 1)  # several targets share no forwards
        for algorithm in ("nonsi", "si", "pearl", "dsi"):
            tokens = [
                engine.generate(PROMPT, max_new_tokens=24, temperature=t, seed=5, algorithm=algorithm).tokens
                for t in (0.0, 0.9)
            ]
            assert tokens == texts


def test_targets_are_exact_if_all_are_and_of_one_kind() -> None:
    """On CPUs forwards are exact by padding alone: the kernels with invariant rows are for GPUs."""
    model = random_model("vicuna-68m", "bfloat16", max_positions=32)
    padded, other = CudaGraphModel(model, 32, exact_size=16), CudaGraphModel(model, 32)
    assert (padded.exact, other.exact, has_invariant_rows(model)) == (True, False, False)
    assert are_exact([padded, padded])
    assert not are_exact([padded, other])


def test_auto_starts_from_simulated_plans_and_adapts(texts: list[tuple[int, ...]]) -> None:
    with Engine.load(target_devices="cpu,cpu", algorithm="auto") as engine:
        plans = list(engine.deployment.plans.values())
        assert [plan.ms for plan in plans] == sorted(plan.ms for plan in plans)
        assert {plan.algorithm for plan in plans} == {"nonsi", "si", "dsi"}
        assert engine.algorithm == "auto"
        assert engine.deployment.latency.drafter_cancel_points == 1  # as in the simulations of the planner
        done = engine.generate(PROMPT, max_new_tokens=24)
        assert done.tokens == texts[0]
        assert done.decisions[0][1].cause == "start"
        done = engine.generate(PROMPT, lookahead=3, max_new_tokens=8)  # which is for DSI
        assert (done.tokens, done.decisions) == (texts[0][:8], ())
        with pytest.raises(ValueError, match="lookahead 3 with the algorithm auto"):
            engine.generate(PROMPT, lookahead=3, algorithm="auto")


def test_devices_take_a_short_context(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    folders = [tmp_path / "target", tmp_path / "drafter"]
    for folder, context in zip(folders, (64, 48)):  # the drafter's does not end the text
        config = LlamaConfig(**shape, vocab_size=4096, max_position_embeddings=context)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    texts = []
    for devices in ("cpu,cpu", None):
        with Engine.load(*map(str, folders), target_devices=devices) as engine:
            done = engine.generate(PROMPT, max_new_tokens=100)
            assert len(done.prompt) + len(done.tokens) == 64
            assert done.tally.failed == 0
            texts.append(done.tokens)
    assert texts[0] == texts[1]


def test_generate_prints_what_auto_chose() -> None:
    options = ("--target-devices", "cpu,cpu", "--algorithm", "auto", "--max-new-tokens", "8", "--json")
    done = dsi("generate", PROMPT, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 8
    assert done.stderr.startswith("auto: ")
    assert "simulated with measured latencies" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--drafter-device", "cpu"), "the targets need devices as well"),
        (("--target-devices", "cpu,cpu", "--threads", "2"), "take one drafter, and no threads"),
        (("--target-devices", "cpu,cpu", "--drafter", "ngram"), "is no model, and needs no device"),
        (("--algorithm", "auto", "--patience", "2"), "min draft 2 with the algorithm auto: it finds its own"),
    ],
)
def test_generate_refuses_bad_devices(arguments: tuple[str, ...], sentence: str) -> None:
    done = dsi("generate", PROMPT, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_measure_latency_times_a_shape_with_random_weights() -> None:
    shape = ("measure", "latency", "--shape", "vicuna-68m")
    done = dsi(*shape, "--random-weights", "--dtype", "bfloat16", "--json")
    figures = json.loads(done.stdout)
    assert figures["label"] == "measured, random weights"
    assert list(figures["ms"]) == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert "say --random-weights" in dsi(*shape).stderr


def on_a_gpu(shape: str, device: str = "cuda:0", context: int = 4096) -> Any:
    """As far as the size of its KV cache depends on a model: on the meta device, which has no memory."""
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16)
    model = SimpleNamespace(config=weights.config, dtype=weights.dtype, device=torch.device(device))
    return SimpleNamespace(model=model, on_gpu=True, context=context)


@pytest.mark.parametrize(
    ("free", "drafter_device", "slots"),
    [
        (100 << 30, "cuda:0", {TARGET: 161_936, DRAFTER: 161_936}),
        (100 << 30, "cuda:1", {TARGET: 163_840, DRAFTER: 64 * 4096}),
        (400 << 30, "cuda:0", {TARGET: 64 * 4096, DRAFTER: 64 * 4096}),
    ],
)
def test_slots_by_role_are_as_many_as_texts_need(
    free: int, drafter_device: str, slots: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    models = {TARGET: on_a_gpu("vicuna-7b"), DRAFTER: on_a_gpu("vicuna-68m", drafter_device)}
    assert slots_by_role(models) == slots
    models[DRAFTER].context = 16  # the target has what the drafter cannot use
    assert slots_by_role(models)[TARGET] >= min(64 * 4096, 163_000)


def test_models_that_cannot_share_forwards_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = (CudaGraphModel(random_model("vicuna-68m", "float32", max_positions=32), 32) for _ in range(2))
    packed, reason = packed_models([target], drafter)
    assert (list(packed), reason, running_texts(packed.values())) == ([TARGET, DRAFTER], "", CPU_TEXTS)
    assert packed_models([target, target], drafter) == ({}, "")

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build_cuda, "PackedCudaModel", fail)
    packed, reason = packed_models([target], drafter)
    assert (packed, running_texts(packed.values())) == ({}, 1)
    assert "CUDA out of memory" in unpacked_warnings(reason)[0]
    monkeypatch.setattr(build_cuda, "kv_room", lambda _: 0)
    assert "memory for 0 tokens of the target's KV cache, and 64" in packed_models([target], drafter)[1]


def test_requests_run_at_once_as_far_as_typical_texts_fit() -> None:
    model = SimpleNamespace(pool=SimpleNamespace(num_slots=10_000), context=4096)
    assert running_texts([model]) == 9  # type: ignore[list-item]
    assert running_texts([model, SimpleNamespace(pool=model.pool, context=100)]) == 9  # type: ignore[list-item]
    model.pool.num_slots = 200
    assert running_texts([model]) == 1  # type: ignore[list-item]


def test_trees_that_are_larger_than_forwards_are_refused() -> None:
    model: Any = None
    deployment = Deployment(model, model, 0, 1, LatencyModel(20.0, 1.0), trees=True, max_tree=255)
    with pytest.raises(ValueError, match="tree 256: a forward of these models has at most 255 draft tokens"):
        deployment.resolve(SpecConfig("si", 4, tree=256))
    assert deployment.resolve(SpecConfig("si", 4, tree=255)).tree == 255


def test_trees_on_devices_are_chosen_for_greedy_requests_alone() -> None:
    model: Any = None
    deployment = Deployment(model, model, 0, 1, LatencyModel(20.0, 1.0), trees=True)
    on_devices = replace(deployment, plans={"si": DeploymentPlan(SpecConfig("si", 4))})
    greedy, sampled = Sampling(), Sampling(temperature=0.5)
    assert (deployment.drafts_trees(greedy), deployment.drafts_trees(sampled)) == (True, True)
    assert (on_devices.drafts_trees(greedy), on_devices.drafts_trees(sampled)) == (True, False)


def test_random_cuda_model_spreads_over_devices() -> None:
    model = random_cuda_model("vicuna-68m", "bfloat16", "cpu+cpu", context=16)
    assert len(model.answer(ForwardRequest([1, 5, 9], 3))) == 1
