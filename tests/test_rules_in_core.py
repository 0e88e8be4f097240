"""Every rule inside the core: the text is exactly as likely as the target says, whatever the timing."""

from functools import partial
from itertools import product
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.generation import Policy
from dsi.core.messages import DRAFTER, RULES, TARGET, Job, Sampling, Verify
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.engine.build_processes import load_model_pair
from dsi.engine.config import EngineConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.models import protocol
from dsi.models.protocol import CancelFlag, ForwardRequest, SamplingModel
from dsi.models.wait import Latency, Wait
from dsi.sampling import acceptance_rules as rules, verify
from dsi.sampling.logits import probabilities
from scripted_choices import ScriptedChoices, exact_distribution
from unbiased import CachedLogits, chi_square

pytestmark = pytest.mark.slow

WORDS = 3
LENGTH = 4


class Rows:
    """A little model; now and then a token is impossible."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._probs: dict[Tokens, np.ndarray] = {}

    def probs(self, text: Tokens) -> np.ndarray:
        if text not in self._probs:
            self._probs[text] = self._make_probs(text)
        return self._probs[text]

    def _make_probs(self, text: Tokens) -> np.ndarray:
        rng = np.random.default_rng([self._number, len(text), *text])
        weights = rng.dirichlet([0.7] * WORDS) * (np.arange(WORDS) != rng.integers(5))
        return np.asarray(weights / weights.sum())

    def forward(self, tokens: Any, start: int, cancelled: CancelFlag) -> np.ndarray:  # noqa: ARG002
        with np.errstate(divide="ignore"):
            return np.log([self.probs(tuple(tokens[:i])) for i in range(start, len(tokens) + 1)])


class Moody(SamplingModel):
    """How long it takes depends on what it reads: whoever chose by arrival would be found out."""

    def _wait(self, request: ForwardRequest) -> None:
        request.cancelled.wait(1 + 7 * (hash(tuple(request.tokens)) % 5))

    def answer(self, request: ForwardRequest) -> Tokens:
        self._wait(request)
        return super().answer(request)

    def draw(self, request: ForwardRequest, start: int) -> Any:
        self._wait(request)
        return super().draw(request, start)


P, Q = Rows(1), Rows(2)


class Keyed:
    """Numbers that are a function of their key: asked again, they say the same."""

    def __init__(self, choices: ScriptedChoices) -> None:
        self.choices = choices
        self.between: dict[Any, tuple[float, float]] = {}

    def below(self, key: Any, chance: float) -> bool:
        return self.token(key, np.array([chance, 1 - chance])) == 0

    def token(self, key: Any, weights: np.ndarray) -> int:
        """One number from 0 to 1 for each key, of which it is known only between which it lies."""
        low, high = self.between.get(key, (0.0, 1.0))
        edges = np.concatenate([[0.0], weights.cumsum() / weights.sum()])
        begins, ends = edges[:-1].clip(low, high), edges[1:].clip(low, high)
        token = self.choices.draw(ends - begins)
        self.between[key] = float(begins[token]), float(ends[token])
        return token


class Coin:
    def __init__(self, keyed: Keyed, key: Any) -> None:
        self.keyed, self.key = keyed, key

    def __lt__(self, chance: float) -> bool:
        return self.keyed.below(self.key, chance)


class Noise(Coin):
    __array_ufunc__ = None

    def __rtruediv__(self, weights: np.ndarray) -> "Noise":
        self.weights = weights
        return self

    def argmax(self) -> int:
        return self.keyed.token(self.key, self.weights)


def written(
    policy: Policy, rule: str, monkeypatch: pytest.MonkeyPatch, context: int, choices: ScriptedChoices
) -> Tokens:
    keyed = Keyed(choices)
    monkeypatch.setattr(verify, "noise_key", lambda *numbers: numbers)
    monkeypatch.setattr(verify, "uniform", partial(Coin, keyed))
    monkeypatch.setattr(verify, "exponential_noise", lambda _, key: Noise(keyed, key))
    monkeypatch.setattr(verify, "sample", lambda row, s, at: keyed.token(at, probabilities(row, s)))
    servers = [Server(f"{TARGET}-{i}", TARGET, Moody(P)) for i in range(3)]
    fleet = SimulatedFleet([*servers, Server(DRAFTER, DRAFTER, Moody(Q))])
    request = Request((), LENGTH, policy, Sampling(1.0, rule=rule), drafter_contexts={DRAFTER: context})
    [done] = EngineLoop(fleet).run(request)
    return done.tokens


def distance(policy: Policy, rule: str, monkeypatch: pytest.MonkeyPatch, context: int = 0) -> float:
    """In total variation from the target's own texts."""
    texts = exact_distribution(partial(written, policy, rule, monkeypatch, context))
    likely = {
        text: prod(float(P.probs(text[:i])[token]) for i, token in enumerate(text))
        for text in product(range(WORDS), repeat=LENGTH)
    }
    assert sum(texts.values()) == pytest.approx(1)
    return sum(abs(texts.get(text, 0) - share) for text, share in likely.items()) / 2


EXACT = {
    "reject, SI": ("reject", speculative(1)),
    "reject, PEARL": ("reject", pearl(1)),
    "reject, DSI": ("reject", distributed(2, max_lead=2)),
    "reject, patient DSI": ("reject", distributed(1, min_draft=2, max_lead=2)),
    "block, SI": ("block", speculative(2)),
    "block, PEARL": ("block", pearl(2)),
    "block, DSI": ("block", distributed(2, max_lead=3)),
    "specinfer, DSI": ("specinfer", distributed(1, max_lead=1)),
}


@pytest.mark.parametrize(("rule", "policy"), EXACT.values(), ids=EXACT)
def test_rules_sample_exactly_the_targets_distribution(
    rule: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distance(policy, rule, monkeypatch) < 1e-12


@pytest.mark.parametrize(("rule", "policy"), EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("context", [1, 2])
def test_rules_are_exact_beyond_the_drafters_context(
    rule: str, policy: Policy, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distance(policy, rule, monkeypatch, context) < 1e-12


def best_first(p: Any, guesses: Any, coins: Any, noise: Any) -> int:
    return rules.specinfer(p, sorted(guesses, key=lambda guess: -p[guess[0]]), coins, noise)


def with_old_coins(row: Any, sampling: Sampling, position: int, _: int = 0) -> Any:
    return draw_guesses(row, sampling, position)


draw_guesses = verify.draw_guesses
FAULTS = {
    "guesses beyond a cut block are drawn again alike": ("block, DSI", protocol, "draw_guesses", with_old_coins),
    "the target's favourite comes first": ("specinfer, DSI", verify, "specinfer", best_first),
    "a correction may be anything": ("reject, DSI", rules, "residual", lambda p, *_: p),
}


@pytest.mark.parametrize(("case", "where", "name", "fault"), FAULTS.values(), ids=FAULTS)
def test_rules_check_catches_a_fault_in_the_core(
    case: str, where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault)
    rule, policy = EXACT[case]
    assert distance(policy, rule, monkeypatch) > 1e-3


# ---- with real coins


@given(
    rule=st.sampled_from(["reject", "block", "specinfer"]),
    lookahead=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=3),
    context=st.sampled_from([0, 0, 1, 5, 9]),
)
@settings(max_examples=60, deadline=None)
def test_rules_one_seed_one_text_under_any_timing(
    rule: str, lookahead: int, seed: int, worlds: list[tuple[int, int, int]], context: int
) -> None:
    """`worlds` are numbers of targets, the patience, and how often a target's forward fails."""
    texts = set()
    for sp, min_draft, failures in worlds:
        policy = distributed(lookahead, min_draft=min_draft, max_lead=3 + seed % 9)
        sampling = Sampling(1.0, seed=seed, rule=rule)
        dice = Random(f"{seed} {worlds}")
        latencies = [Latency(1 + dice.random() * 9, jitter=dice.random() * 0.9) for _ in range(sp + 1)]
        servers = [Server(f"{TARGET}-{i}", TARGET, Wait(SamplingModel(P), latencies[i], i)) for i in range(sp)]
        servers.append(Server(DRAFTER, DRAFTER, Wait(SamplingModel(Q), latencies[-1], sp)))

        def fails(job: Job, rate: int = failures, dice: Random = dice) -> bool:
            return isinstance(job, Verify) and dice.random() < rate / 20

        fleet = SimulatedFleet(servers, fails=fails)
        request = Request((1, 2), 12, policy, sampling, drafter_contexts={DRAFTER: context})
        [done] = EngineLoop(fleet).run(request)
        texts.add(done.tokens)
    assert len(texts) == 1


def test_rules_give_the_greedy_text_at_temperature_0() -> None:
    texts = set()
    for rule in RULES:
        for policy in (autoregressive(), speculative(3), pearl(2), distributed(2)):
            servers = [Server(f"{TARGET}-{i}", TARGET, Wait(SamplingModel(P), Latency(3))) for i in range(3)]
            servers.append(Server(DRAFTER, DRAFTER, Wait(SamplingModel(Q), Latency(1))))
            [done] = EngineLoop(SimulatedFleet(servers)).run(Request((1,), 9, policy, Sampling(rule=rule)))
            texts.add(done.tokens)
    assert len(texts) == 1


def test_rules_let_the_target_sample_without_a_drafter() -> None:
    servers = [Server(TARGET, TARGET, Wait(SamplingModel(P), Latency(3)))]
    for rule in ("reject", "block", "specinfer"):
        sampling = Sampling(1.0, seed=5, rule=rule)
        [done] = EngineLoop(SimulatedFleet(servers)).run(Request((1,), 9, distributed(2), sampling))
        [plain] = EngineLoop(SimulatedFleet(servers)).run(Request((1,), 9, autoregressive(), sampling))
        assert done.tokens == plain.tokens


def test_rules_refuse_several_drafters() -> None:
    servers = [Server(TARGET, TARGET, Wait(SamplingModel(P), Latency(3)))]
    policy = distributed(2, (DRAFTER, "second"))
    with pytest.raises(ValueError, match="rule reject with 2 drafters: whose draft token is verified would depend"):
        EngineLoop(SimulatedFleet(servers)).run(Request((1,), 9, policy, Sampling(1.0, rule="reject")))


@pytest.fixture(scope="module")
def pair() -> tuple[CachedLogits, CachedLogits]:
    found = load_model_pair(EngineConfig())
    return CachedLogits(found.target.backend), CachedLogits(found.drafter.backend)


SAMPLES = 1500  # `benchmarks/unbiased.py` takes enough to see a total variation of 0.02
PROMPT = (407, 311, 68, 272)


@pytest.mark.parametrize("rule", RULES)
def test_rules_sample_the_builtin_targets_distribution(rule: str, pair: Any) -> None:
    target, drafter = pair
    assert chi_square(target, drafter, rule, PROMPT, SAMPLES) < 4


def test_rules_check_catches_a_biased_rule(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "specinfer", best_first)
    target, drafter = pair
    assert chi_square(target, drafter, "specinfer", PROMPT, SAMPLES) > 6
