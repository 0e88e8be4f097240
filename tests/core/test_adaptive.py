"""The adaptive policy: it follows the latency table at the learned acceptance rates, and changes no text."""

import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.adaptive import AcceptanceEMA, AdaptiveController, LatencyMonitor
from dsi.core.generation import Generation
from dsi.core.latency_table import LatencyTable
from dsi.core.messages import TARGET, Draft, Sampling
from dsi.core.policies import autoregressive, policy_for
from dsi.core.request import Completion, Request
from dsi.core.sequence import TokenSequence
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.spans import Span
from dsi.planning.auto import latency_table
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

STEPS = ((1, 20.0), (64, 30.0))
SETTING = SimulationConfig(
    LatencyModel(20.0, 2.0, contention=0.2, cancel_points=8, by_width=STEPS), 0.8, 3, 200, thread_pool=False
)
TABLE = latency_table(SETTING)


def generated(setting: SimulationConfig, seed: int = 0, sampling: Sampling | None = None) -> Completion:
    fleet = setting.simulated(seed)
    loop = EngineLoop(fleet)
    monitor = LatencyMonitor(TABLE)
    fleet.observe = monitor.observe
    controller = AdaptiveController(TABLE, setting.drafter_names, 0.7, monitor)
    [done] = loop.run(Request((1, 2, 3), setting.tokens, controller, sampling or setting.sampling))
    return done


def specs(done: Completion) -> list[SpecConfig]:
    return [decision.spec for _, decision in done.decisions]


def test_adaptive_stops_speculating_when_nothing_is_accepted() -> None:
    done = generated(replace(SETTING, acceptance=0.0))
    assert specs(done)[0].speculates
    assert not specs(done)[-1].speculates
    assert done.decisions[-1][1].cause == "acceptance"
    assert done.elapsed < 200 * 20 * 1.02


def test_adaptive_speculates_again_when_acceptance_recovers() -> None:
    done = generated(replace(SETTING, acceptance=0.0, acceptance_change=(100, 1.0)))
    kinds = [spec.speculates for spec in specs(done)]
    assert kinds[0]
    assert kinds[-1]
    assert not all(kinds)
    assert done.elapsed < 100 * 20 * 1.02 + 100 * 20 * 0.5


def test_adaptive_keeps_speculating_at_full_acceptance() -> None:
    done = generated(replace(SETTING, acceptance=1.0))
    assert all(spec.speculates for spec in specs(done))
    assert done.elapsed < 200 * 20 / 4


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_adaptive_gives_the_targets_text(acceptance: float) -> None:
    setting = replace(SETTING, acceptance=acceptance, acceptance_change=(90, 1 - acceptance))
    [plain] = EngineLoop(setting.simulated(5)).run(Request((1, 2, 3), 200, autoregressive()))
    assert generated(setting, 5).tokens == plain.tokens


def test_adaptive_gives_one_text_under_rejection_sampling() -> None:
    rule = Sampling(1.0, rule="reject", seed=3)
    setting = replace(SETTING, acceptance=0.3, tokens=60).with_spec(rule="reject")
    fleet = setting.simulated(0)
    loop = EngineLoop(fleet)
    controller = AdaptiveController(TABLE, setting.drafter_names, 0.7)
    [first] = loop.run(Request((1, 2, 3), 60, controller, rule))
    before = controller.acceptance[("drafter",)].rate
    loop.run(*(Request((9, i), 60, controller) for i in range(3)))
    assert controller.acceptance[("drafter",)].rate < before - 0.2
    assert loop.run(Request((1, 2, 3), 60, controller, rule))[0].tokens == first.tokens


def test_adaptive_notices_a_slow_drafter() -> None:
    done = generated(SETTING.with_latency(drafter_ms=8.0))
    assert "latency" in [decision.cause for _, decision in done.decisions]


def test_adaptive_uses_the_better_of_two_drafters() -> None:
    setting = replace(SETTING, drafters=2, acceptance=0.9)
    servers = setting.servers(0)
    bad = replace(setting, acceptance=0.0).servers(0)[-2]
    assert bad.name == "drafter"
    loop = EngineLoop(SimulatedFleet([bad if each.name == "drafter" else each for each in servers]))
    controller = AdaptiveController(TABLE, ("drafter", "drafter-2"), 0.7)
    [done] = loop.run(Request((1, 2, 3), 100, controller))
    assert done.decisions[-1][1].spec.drafters != ("drafter",)
    assert controller.acceptance[("drafter",)].rate < 0.2 < 0.8 < controller.acceptance[("drafter-2",)].rate


def test_adaptive_respects_max_targets() -> None:
    known = LatencyTable((SpecConfig("dsi", 1, 0, max_targets=2),), (1.0,), (((1.0, 1.0),),))
    log: list[Span] = []
    setting = replace(SETTING, sp=6, acceptance=1.0, tokens=40).with_latency(drafter_ms=1.0)
    fleet = setting.simulated(0, log)
    EngineLoop(fleet).run(Request((1, 2, 3), 40, AdaptiveController(known, ("drafter",), 0.5)))
    spans = [span for span in log if span.kind == "verify"]
    for span in spans:
        assert sum(other.start <= span.start < other.end for other in spans) <= 2


def test_acceptance_ema_forgets() -> None:
    acceptance = AcceptanceEMA(0.7)
    for _ in range(300):
        acceptance.add(True)
    assert acceptance.rate > 0.98
    for _ in range(60):
        acceptance.add(False)
    assert acceptance.rate < 0.3


def test_latency_table_has_the_best_config_for_each_rate() -> None:
    known = LatencyTable(
        (SpecConfig("nonsi"), SpecConfig("dsi", 4, 2, max_targets=1)), (1.0,), (((10.0, 10.0, 10.0), (15.0, 9.0, 3.0)),)
    )
    assert [known.best(0, rate) for rate in range(3)] == [0, 1, 1]
    assert [known.rate_index(rate) for rate in (0.0, 0.2, 0.3, 1.0)] == [0, 0, 1, 2]
    assert str(known.configs[0]) == "no speculation"
    assert str(known.configs[1]) == "SP 1, lookahead 4, min draft 2"


@pytest.mark.parametrize("context", [2, 40])
def test_adaptive_goes_on_with_a_drafter_that_has_room(context: int) -> None:
    """The first one is as good, and its context ends within the prompt or the text."""
    setting = replace(SETTING, drafters=2, acceptance=0.9, tokens=100)
    controller = AdaptiveController(TABLE, setting.drafter_names, 0.7)
    log: list[Span] = []
    contexts = {"drafter": context}
    request = Request((1, 2, 3), 100, controller, drafter_contexts=contexts)
    [done] = EngineLoop(setting.simulated(0, log)).run(request)
    [plain] = EngineLoop(setting.simulated(0)).run(Request((1, 2, 3), 100, autoregressive()))
    assert done.tokens == plain.tokens
    assert done.decisions[-1][1].spec.drafters == ("drafter-2",)
    assert all(len(span.context) <= context for span in log if span.server == "drafter")
    causes = [decision.cause for _, decision in done.decisions]
    assert causes[0] == "start"
    assert ("context" in causes) == (context == 40)


def test_adaptive_goes_on_without_its_only_drafter() -> None:
    setting = replace(SETTING, acceptance=1.0, tokens=60)
    controller = AdaptiveController(TABLE, setting.drafter_names, 0.7)
    request = Request((1, 2, 3), 60, controller, drafter_contexts={"drafter": 22})
    [done] = EngineLoop(setting.simulated(0)).run(request)
    [plain] = EngineLoop(setting.simulated(0)).run(Request((1, 2, 3), 60, autoregressive()))
    assert (done.tokens, done.tally.drafted) == (plain.tokens, 20)


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=2),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.integers(1, 12),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_adaptive_gives_the_targets_text_in_any_contexts(
    contexts: list[int], acceptance: float, prompt: int, seed: int
) -> None:
    setting = replace(SETTING, drafters=2, acceptance=acceptance, tokens=30)
    by_name = dict(zip(setting.drafter_names, contexts))
    controller = AdaptiveController(TABLE, setting.drafter_names, 0.7)
    log: list[Span] = []
    request = Request((5,) * prompt, 30, controller, drafter_contexts=by_name)
    [done] = EngineLoop(setting.simulated(seed, log)).run(request)
    [plain] = EngineLoop(setting.simulated(seed)).run(replace(request, policy=autoregressive()))
    assert done.tokens == plain.tokens
    assert all(len(span.context) <= (by_name.get(span.server) or len(span.context)) for span in log)


IN_TURN = LatencyModel(10.0, 2.0, cancel_points=8, by_width=((1, 10.0), (64, 15.0)))
ON_SHARED_CORES = replace(SETTING, sp=1, latency=replace(SETTING.latency, alone=IN_TURN))


def test_latency_table_takes_turns_where_that_is_faster() -> None:
    table = latency_table(ON_SHARED_CORES)
    best = [table.configs[table.best(table.scale_index(1.0), table.rate_index(rate))] for rate in (0.0, 0.82)]
    assert [config.algorithm for config in best] == ["nonsi", "si"]
    ms = table.ms[table.scale_index(1.0)]
    assert ms[0][0] == pytest.approx(10.0)
    assert (table.forward_ms(1), table.forward_ms(1, alone=True)) == (20.0, 10.0)


def drafted(config: SimulationConfig, table: LatencyTable) -> int:
    controller = AdaptiveController(table, config.drafter_names, 0.7)
    [done] = EngineLoop(config.simulated(0)).run(Request((1, 2, 3), config.tokens, controller, config.sampling))
    return done.tally.drafted


def test_adaptive_probes_rarely_where_drafts_cost_time() -> None:
    """At most 1% of the time, if the drafter takes it from the target."""
    shared = latency_table(ON_SHARED_CORES)
    often, rarely = (AdaptiveController(table, ("drafter",), 0.7).probe_every for table in (TABLE, shared))
    assert (often, rarely) == (4, 10)  # a draft token takes a tenth of a forward


def test_adaptive_stops_only_where_a_lucky_rate_would_not_pay_either() -> None:
    unsure, sure = AcceptanceEMA(0.4), AcceptanceEMA(0.4)
    for i in range(200):
        sure.add(i % 5 < 2)
    assert unsure.rate == pytest.approx(0.4)
    assert sure.rate == pytest.approx(0.4, abs=0.05)
    assert unsure.optimistic_rate > 0.6 > 0.5 > sure.optimistic_rate > sure.rate


def test_latency_table_predicts_other_speeds_in_the_background() -> None:
    here, background = latency_table(SETTING), latency_table(SETTING, in_background=True)
    end = time.monotonic() + 60
    while not background.is_ready(0):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert background.ms[0] == here.ms[0]
    assert here.ms[0] != here.ms[1]


def test_adaptive_never_drafts_with_a_drafter_that_cannot_pay() -> None:
    slow = replace(SETTING, sp=1, latency=replace(SETTING.latency, drafter_ms=90.0))
    assert drafted(slow, latency_table(slow)) == 0


def test_adaptive_drafts_with_the_drafter_that_it_chose_under_si() -> None:
    config = replace(SETTING, drafters=2, tokens=20)
    log: list[Span] = []
    policy = policy_for(SpecConfig("si", 3, drafters=("drafter-2",)))
    [done] = EngineLoop(config.simulated(0, log)).run(Request((1, 2, 3), 20, policy))
    assert done.tally.accepted > 0
    assert {span.server for span in log if span.kind == "draft"} == {"drafter-2"}


def test_adaptive_text_under_rejection_sampling_does_not_depend_on_what_was_learned() -> None:
    sampling = Sampling(1.0, rule="reject")
    texts = set()
    for prior in (0.1, 0.99):
        controller = AdaptiveController(TABLE, SETTING.drafter_names, prior)
        [done] = EngineLoop(SETTING.simulated(0)).run(Request((1, 2, 3), 40, controller, sampling))
        texts.add((done.tokens, done.tally.drafted))
    assert len(texts) == 1


def test_adaptive_streams_where_that_is_faster_than_any_speculation() -> None:
    table = latency_table(SETTING, plain_ms=1.0)
    controller = AdaptiveController(table, SETTING.drafter_names, 0.9)
    assert not controller.spec(controller.best({("drafter",): 0.9}, 0.0)).speculates
    assert not controller.can_pay(("drafter",))


def test_adaptive_learns_how_fast_a_streamed_text_is() -> None:
    table = latency_table(SETTING, plain_ms=1.0)
    monitor = LatencyMonitor(table)
    controller = AdaptiveController(table, SETTING.drafter_names, 0.9, monitor)
    for _ in range(10):
        monitor.observe(Draft(1, TokenSequence.of((1,)), 9, TARGET), 30.0, 0)
    assert monitor.streams_timed
    assert monitor.stream_slowdown == pytest.approx(30)
    assert controller.spec(controller.best({("drafter",): 0.9}, 0.0)).speculates


def test_adaptive_times_a_stream_before_it_speculates() -> None:
    table = latency_table(SETTING, plain_ms=1000.0)  # so it was measured, wrongly perhaps
    controller = AdaptiveController(table, SETTING.drafter_names, 0.9)
    g = Generation((1,), 9, controller, streams=True)
    [job] = g.start().start
    assert isinstance(job, Draft)
    assert job.model == TARGET


class FastTree:
    """A tree that is faster than any chain."""

    spec = SpecConfig("si", 2, max_targets=1, tree=4)

    def best(self, scale: float, acceptance: float, runner_up: float, limit_ms: float) -> SpecConfig:  # noqa: ARG002
        return self.spec

    def ms(self, spec: SpecConfig, scale: float, acceptance: float, runner_up: float) -> float:  # noqa: ARG002
        return 0.1


@pytest.mark.parametrize(("greedy_trees", "temperature", "tree"), [(True, 0.0, 4), (True, 0.7, 0), (False, 0.7, 4)])
def test_trees_may_be_for_greedy_requests_alone(greedy_trees: bool, temperature: float, tree: int) -> None:
    controller = AdaptiveController(replace(TABLE, trees=FastTree(), greedy_trees=greedy_trees), ("drafter",), 0.7)
    generation = Generation((1, 2), 20, controller, sampling=Sampling(temperature))
    generation.start()
    assert generation.decisions[0].spec.tree == tree


def test_trees_for_greedy_requests_are_not_what_was_decided_for_sampled_ones() -> None:
    """Decisions are kept for all requests that know the same."""
    controller = AdaptiveController(replace(TABLE, trees=FastTree(), greedy_trees=True), ("drafter",), 0.7)
    for temperature, tree in ((0.0, 4), (0.7, 0), (0.0, 4)):
        generation = Generation((1, 2), 20, controller, sampling=Sampling(temperature))
        generation.start()
        request = controller._requests[generation]
        candidate = controller.decide(request._inputs(generation), partial(request._best, generation))
        assert controller.spec(candidate).tree == tree
