"""Same seed, same tokens, whatever the algorithm, the servers, their timing or their failures."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.generation import Policy
from dsi.core.messages import (
    DRAFTER,
    TARGET,
    Draft,
    DraftedLevel,
    Event,
    Failed,
    Job,
    Prefilled,
    Sampling,
    Verified,
    Verify,
)
from dsi.core.policies import autoregressive, distributed, pearl, policy_for, speculative
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.core.stats import ServerUsage
from dsi.core.tree_shape import END
from dsi.fleets.job_requests import TreeGrowth
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.simulated_shared import SharedSimulatedFleet
from dsi.fleets.worker import work
from dsi.models.protocol import ForwardRequest, Model
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Wait

NAMES = (DRAFTER, "second", "third")

lookaheads = st.integers(1, 12)
drafters = st.integers(1, 3).map(lambda count: NAMES[:count])
trees = st.builds(
    SpecConfig,
    st.sampled_from(["si", "pearl", "dsi"]),
    lookaheads,
    st.integers(0, 6),
    st.sampled_from([1, 3, 8, None]),
    st.sampled_from([None, 1, 2, 5]),
    drafters=drafters,
    tree=st.integers(1, 20),
    chances=st.sampled_from([(), (0.7, 0.2, 0.1), (0.5, 0.5), (1.0,), (0.4, 0.3, 0.2, 0.1)]),
)
one_policy = st.one_of(
    trees.map(policy_for),
    st.just(autoregressive()),
    lookaheads.map(speculative),
    lookaheads.map(pearl),
    st.builds(
        distributed,
        lookaheads,
        drafters,
        st.integers(0, 6),
        st.sampled_from([1, 1.5, 3, 8, 1e9]),
    ),
)


def switching(policies: list[Policy], tokens: int) -> Policy:
    """Another one of the policies after every so many tokens, as `auto` changes its own."""
    return lambda g: policies[g.root.depth // tokens % len(policies)](g)


policies = st.one_of(one_policy, st.builds(switching, st.lists(one_policy, min_size=2, max_size=3), st.integers(1, 6)))
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 2**40),
)
requests = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 63), max_size=5).map(tuple),
    max_new_tokens=st.integers(1, 30),
    policy=policies,
    sampling=samplings,
    stop=st.sampled_from([frozenset[int](), frozenset({0, 2, 4, 6, 8, 10})]),
)
contexts: st.SearchStrategy[dict[str, int]] = st.one_of(
    st.just({}), st.dictionaries(st.sampled_from(NAMES), st.integers(0, 25))
)


def alone(target: ToyTarget, request: Request) -> Tokens:
    """The target by itself, token by token, in four lines that share nothing with the core."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        tokens += target.answer(ForwardRequest(tokens, len(tokens), sampling=request.sampling))
        if tokens[-1] in request.stop:
            break
    return tuple(tokens[len(request.prompt) :])


def check_fits(job: Job, contexts: dict[str, int]) -> None:
    """No drafter is asked to read a text longer than its context."""
    if isinstance(job, Draft) and contexts.get(job.model):
        assert job.context.length + num_drafted(job) - 1 <= contexts[job.model]


def num_drafted(job: Draft) -> int:
    """Draft tokens after the verified text on the longest path."""
    if not job.expansions:
        return job.count
    depths = {END: 0}
    for node, (parent, _) in enumerate(job.tree):
        depths[node] = depths[parent] + 1
    for parent, count in job.expansions:
        for _ in range(count):
            depths[len(depths) - 1] = depths[parent] + 1
    return max(depths.values())


class ShuffledFleet:
    """Answers in any order, fails at random, and goes on answering jobs that were cancelled."""

    def __init__(
        self, models: dict[str, ToyTarget | ToyDrafter], dice: Random, failures: float, contexts: dict[str, int]
    ) -> None:
        self.job_ids: Iterator[int] = itertools.count()
        self.servers = {role: Server(role, role, model) for role, model in models.items()}
        self.dice, self.failures, self.contexts = dice, failures, contexts
        self.streams: dict[int, list[Iterator[Event]]] = {}
        self.said: list[Event] = []
        self.growths: dict[int, TreeGrowth] = {}
        self.following: dict[int, Verify] = {}  # by the draft whose tree it verifies

    def start(self, job: Job) -> None:
        role = getattr(job, "model", TARGET)
        check_fits(job, self.contexts)
        # A memory of its own for each job: this fleet has as many servers as it has jobs.
        server = Server(role, role, self.servers[role].model)
        if isinstance(job, Verify) and job.draft is not None:
            self.following[job.draft] = job
            return
        if isinstance(job, Draft) and job.expansions:
            self.growths[job.id] = TreeGrowth(job)
        self.streams.setdefault(job.id, []).append(work(job, server))

    def end_draft(self, id: int) -> None:
        """What waits for a draft is verified if its tree is there."""
        if (job := self.following.pop(id, None)) is None:
            return
        growth, server = self.growths[id], Server(TARGET, TARGET, self.servers[TARGET].model)
        events: list[Event] = [Failed(job.id, "there is no tree")]
        if growth.done:
            [verified] = work(growth.verification(job), server)
            assert isinstance(verified, Verified)
            events = [replace(verified, tokens=growth.by_number(verified.tokens, -1))]
        self.streams[job.id] = [iter(events)]

    def cancel(self, id: int) -> None:
        if self.dice.random() < 0.5:
            self.streams.pop(id, None)

    num_requests = 0
    most_verified_unseen = 12

    def promote(self, id: int) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def now(self) -> int:
        return len(self.said)

    def server_usage(self) -> dict[str, ServerUsage]:
        return {}

    def next_event(self) -> Event:
        if self.said and self.dice.random() < 0.1:
            return self.dice.choice(self.said)  # once more, long after
        id = self.dice.choice(sorted(self.streams))
        if self.dice.random() < self.failures:
            del self.streams[id]
            self.end_draft(id)
            return Failed(id, "shuffled")
        event = next(self.streams[id][-1], None)
        if isinstance(event, DraftedLevel):
            self.growths[id].add(event.children)
        if event is None:
            del self.streams[id]
            self.end_draft(id)
            return Prefilled(id)
        if type(event) is not Prefilled:
            self.said = [*self.said[-50:], event]
        return event


@pytest.mark.slow
@given(
    st.lists(requests, min_size=1, max_size=3),
    st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=3, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.02, 0.2]),
    contexts,
)
@settings(max_examples=500)
def test_lossless_under_any_order_failures_and_contexts(
    asked: list[Request], rates: list[float], seed: int, failures: float, contexts: dict[str, int]
) -> None:
    asked = [replace(request, drafter_contexts=contexts) for request in asked]
    target = ToyTarget(seed)
    models: dict[str, ToyTarget | ToyDrafter] = {TARGET: target}
    models |= {
        name: ToyDrafter(target, rate, seed + i, runner_up_acceptance=0.6)
        for i, (name, rate) in enumerate(zip(NAMES, rates))
    }
    fleet = ShuffledFleet(models, Random(seed), failures, contexts)
    done = EngineLoop(fleet).run(*asked)
    assert [completion.tokens for completion in done] == [alone(target, request) for request in asked]


latencies = st.floats(0.01, 3)


@pytest.mark.slow
@given(
    st.lists(requests, min_size=1, max_size=3),
    st.integers(1, 8),
    st.lists(st.tuples(latencies, st.floats(0, 1)), min_size=3, max_size=3),
    latencies,
    st.sampled_from([0, 1, 4]),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    st.integers(0, 10**6),
    contexts,
)
@settings(max_examples=500)
def test_lossless_under_any_latencies_servers_and_contexts(
    asked: list[Request],
    targets: int,
    crew: list[tuple[float, float]],
    slow: float,
    pieces: int,
    jitter: float,
    network: float,
    eager: bool,
    seed: int,
    contexts: dict[str, int],
) -> None:
    asked = [replace(request, drafter_contexts=contexts) for request in asked]
    target = ToyTarget(seed)
    dice = Random(seed)
    aim = Latency(slow, slow * 3, slow / 10, jitter)
    servers = [Server(f"target-{i}", TARGET, Wait(target, aim, seed + i)) for i in range(targets)]
    for i, (name, (latency, rate)) in enumerate(zip(NAMES, crew)):
        drafter = ToyDrafter(target, rate, seed + i, runner_up_acceptance=0.6)
        servers.append(Server(name, name, Wait(drafter, Latency(latency, jitter=jitter), ~i)))

    def fails(job: Job) -> bool:
        check_fits(job, contexts)
        return dice.random() < 0.05

    fleet = SimulatedFleet(
        servers, cancel_points=pieces, network=network, contention=0.1, thread_pool=eager, fails=fails
    )
    done = EngineLoop(fleet).run(*asked)
    assert [completion.tokens for completion in done] == [alone(target, request) for request in asked]
    assert {server.role for server in servers if fleet.busy[server.name]} <= {TARGET, *NAMES}


@pytest.mark.slow
@given(
    st.lists(requests, min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=3, max_size=3),
    st.sampled_from([0, 8, 32]),
    st.integers(0, 10**6),
    contexts,
)
@settings(max_examples=150)
def test_lossless_in_shared_forwards(
    asked: list[Request], rates: list[float], tree: int, seed: int, contexts: dict[str, int]
) -> None:
    """Whatever the policies, and the chains and trees that suit the load: one target and drafters compute for all."""
    target, dice = ToyTarget(seed), Random(seed)
    models: dict[str, Model] = {TARGET: target}
    models |= {
        name: ToyDrafter(target, rate, seed + i, runner_up_acceptance=0.6)
        for i, (name, rate) in enumerate(zip(NAMES, rates))
    }
    loop = EngineLoop(SharedSimulatedFleet(models, {role: lambda rows: 4 + rows for role in models}))
    turns = [SpecConfig("nonsi"), SpecConfig("si", 3), SpecConfig("si", 2, tree=5), SpecConfig("si", 4, tree=9)]
    loop.load.shared_spec = lambda *_: dice.choice(turns)
    shared = SharedForwards(DRAFTER, loop.load)
    asked = [replace(request, drafter_contexts=contexts) for request in asked]
    policies = [shared.policy(request.policy, tree) if dice.random() < 0.5 else request.policy for request in asked]
    done = loop.run(*(replace(request, policy=policy) for request, policy in zip(asked, policies)))
    assert [completion.tokens for completion in done] == [alone(target, request) for request in asked]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("targets", range(1, 9))
def test_lossless_one_seed_one_text_for_every_algorithm(targets: int, temperature: float) -> None:
    target = ToyTarget(5)
    sampling = Sampling(temperature, seed=9)
    texts = set()
    policies: list[Policy] = [
        autoregressive(),
        speculative(4),
        pearl(4),
        distributed(2),
        distributed(3, min_draft=3),
        *(policy_for(SpecConfig(algorithm, 3, tree=8)) for algorithm in ("si", "pearl", "dsi")),
    ]
    for policy in policies:
        servers = [Server(f"t{i}", TARGET, Wait(target, Latency(7.0))) for i in range(targets)]
        servers.append(Server("d", DRAFTER, Wait(ToyDrafter(target, 0.7, runner_up_acceptance=0.5), Latency(1.0))))
        [done] = EngineLoop(SimulatedFleet(servers)).run(Request((1, 2), 40, policy, sampling))
        texts.add(done.tokens)
    assert texts == {alone(target, Request((1, 2), 40, autoregressive(), sampling))}


@pytest.mark.parametrize("context", [1, 2, 3, 20, 41])
def test_lossless_whatever_the_drafters_context(context: int) -> None:
    """A drafter is used up to its context, also where the prompt alone is longer, and the text goes on without it."""
    target = ToyTarget(5)
    prompt, tokens = (1, 2), 40
    for policy in (speculative(4), pearl(4), distributed(2), distributed(3, min_draft=3, max_lead=8)):
        servers = [Server(f"t{i}", TARGET, Wait(target, Latency(7.0))) for i in range(3)]
        servers.append(Server("d", DRAFTER, Wait(ToyDrafter(target, 1.0), Latency(1.0))))
        request = Request(prompt, tokens, policy, drafter_contexts={DRAFTER: context})
        [done] = EngineLoop(SimulatedFleet(servers)).run(request)
        assert done.tokens == alone(target, request)
        room = min(tokens - 1, max(0, context + 1 - len(prompt)))
        assert min(room, 1) <= done.tally.drafted <= room


def test_lossless_check_catches_a_wrong_target_token() -> None:
    """The check can fail: a target that errs on one server gives another text."""
    target = ToyTarget(5)
    servers = [Server("good", TARGET, Wait(target, Latency(7.0)))]
    servers.append(Server("bad", TARGET, Wait(ToyDrafter(target, 0.9), Latency(7.0))))
    servers.append(Server("d", DRAFTER, Wait(ToyDrafter(target, 0.9, 4), Latency(1.0))))
    request = Request((1, 2), 60, distributed(2))
    [done] = EngineLoop(SimulatedFleet(servers)).run(request)
    assert done.tokens != alone(target, request)
