"""Which slices of a GPU are used first where they share its memory bandwidth."""

from collections.abc import Sequence
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.tree_policies import PRIOR_CHANCES
from dsi.engine import profile_cuda
from dsi.engine.build_cuda import packed_servers
from dsi.engine.profile_cuda import PACKED_ROWS, order_by_contention, with_packed_forwards, with_shared_drafts
from dsi.engine.profile_trees import ON_GPU, fitted_trees, with_trees
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.servers import PrefixTable, Server, make_servers
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.protocol import Answer, ForwardRequest
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import draft_ms
from dsi.planning.trees import turn_ms
from polled_pair import PolledPair


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd and even slices share a memory path each, which serves two without contention."""

    def concurrent_forward_ms(models: Sequence[Any], *_: Any) -> float:
        busiest: int = max(sum(model % 2 == half for model in models) for half in (0, 1))
        return 10.0 + len(models) + 5.0 * max(0, busiest - 2)

    monkeypatch.setattr(profile_cuda, "concurrent_forward_ms", concurrent_forward_ms)


@pytest.mark.usefixtures("halves")
def test_order_by_contention_puts_independent_slices_first() -> None:
    models: list[Any] = [1, 3, 5, 7, 2, 4, 6]
    ordered = order_by_contention(models)
    assert sorted(ordered) == sorted(models)
    assert ordered[0] == 1  # alone, all are equal
    assert sum(model % 2 for model in ordered[:4]) == 2


@pytest.mark.usefixtures("halves")
def test_order_by_contention_keeps_one_or_two() -> None:
    assert order_by_contention([]) == []
    assert order_by_contention([3, 1]) == [3, 1]  # type: ignore[list-item]


class PackedModel:
    """Takes 3 ms and a quarter for each further row, by a clock of its own."""

    class Pool:
        max_texts = 64

    pool, max_picked = Pool(), 0

    def __init__(self, row_ms: float = 0.25) -> None:
        self.now, self._row_ms = 0.0, row_ms

    def forward_packed(self, requests: Sequence[Any], at_once: int = 1) -> list[torch.Tensor]:  # noqa: ARG002
        self.now += (3 + (len(requests) - 1) * self._row_ms) / 1000
        return [torch.zeros(1, 5) for _ in requests]


def test_with_shared_drafts_separates_forwards_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = PackedModel()
    monkeypatch.setattr(profile_cuda, "perf_counter", lambda: model.now)
    latency = with_shared_drafts(LatencyModel(20.0, 1.0), model, prompt=4)
    assert PACKED_ROWS > 1
    assert latency.drafter_shared_ms == pytest.approx(2.0)
    assert latency.drafter_per_token_ms == pytest.approx(0.25)


def test_with_shared_drafts_finds_rows_that_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the same as rows that were not measured: more requests speculate further."""
    model: Any = PackedModel(row_ms=0)
    monkeypatch.setattr(profile_cuda, "perf_counter", lambda: model.now)
    latency = with_shared_drafts(LatencyModel(20.0, 3.0), model, prompt=4)
    assert draft_ms(latency, 64) == pytest.approx(draft_ms(latency, 1), rel=1e-3)
    assert draft_ms(LatencyModel(20.0, 3.0), 64) > 10 * draft_ms(latency, 64)


def test_fitted_trees_give_the_turns_that_were_measured() -> None:
    true = LatencyModel(20.0, 1.0, drafter_per_token_ms=0.1, drafter_level_ms=0.3, tree_ms=0.7, tree_node_ms=0.02)
    few, wide, deep = (turn_ms(true, PRIOR_CHANCES, *tree) for tree in ON_GPU)
    fitted = fitted_trees(replace(true, drafter_level_ms=0, tree_ms=0, tree_node_ms=0), few, wide, deep)
    for name in ("drafter_level_ms", "tree_ms", "tree_node_ms"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name))
    few, wide, deep = (turn_ms(LatencyModel(20.0, 1.0), PRIOR_CHANCES, *tree) for tree in ON_GPU)
    faster = fitted_trees(LatencyModel(20.0, 2.0), few, wide, deep)
    assert faster.tree_ms == 0  # noise, but nothing takes less than no time


def test_with_trees_measures_turns_on_the_servers() -> None:
    """Servers that wait, in real time: what a level takes beyond a draft token is found."""
    target = ToyTarget(1)
    models = {TARGET: Waiting(target, 0.004), DRAFTER: Waiting(ToyDrafter(target, 0.5, 2, 0.5), 0.003)}
    servers = [Server(f"{TARGET}-1", TARGET, models[TARGET]), Server(DRAFTER, DRAFTER, models[DRAFTER])]
    packed = {server.name: Server(server.name, server.role, server.model, PrefixTable(4)) for server in servers}
    latency = LatencyModel(4.0, 1.0)
    measured = with_trees(latency, CudaFleet(servers, packed=packed), (1,) * 4, 256)
    assert 1.5 < measured.drafter_level_ms < 3.5
    assert with_trees(latency, CudaFleet(servers, packed=packed), (1,) * 4, 51) == latency  # no room for a text


def test_with_packed_forwards_leaves_nothing_in_the_caches() -> None:
    """Of models on the CPU; what they compute there is slow, and measured all the same."""
    sizes: Any = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    weights = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=97, max_position_embeddings=160)).eval()
    single = [CudaGraphModel(weights, 160), CudaGraphModel(weights, 160, drafts=True)]
    packed = {role: PackedCudaModel(weights, 160, 640, 4, drafts=role == DRAFTER) for role in (TARGET, DRAFTER)}
    fleet = CudaFleet(make_servers(single[:1], {DRAFTER: single[1]}), packed=packed_servers(packed))
    measured = with_packed_forwards(LatencyModel(0.01, 0.01), fleet, packed, 4)
    assert measured.drafter_per_token_ms > 0
    assert measured.tree_ms + measured.tree_node_ms + measured.drafter_level_ms > 0
    for model in packed.values():
        model.pool.clear()
        assert model.pool.slots.num_free == 640


class Waiting(PolledPair):
    """Waits for so many seconds in each forward."""

    def __init__(self, model: Any, seconds: float) -> None:
        super().__init__(model, 1)
        self._seconds = seconds

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:
        sleep(self._seconds)
        return super().answer_packed(requests, at_once)
