"""The acceptance rules are lossless, and their acceptance rates are those of theory."""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.sampling import acceptance_rules as rules
from dsi.sampling.acceptance_rules import (
    DrawnToken,
    acceptance_probability,
    backoff_acceptance,
    block,
    match,
    match_acceptance_rate,
    prefix_acceptance,
    reject,
    rejection_acceptance_rate,
    residual,
    residual_weights,
    specinfer,
)
from dsi.sampling.logits import gumbel_argmax
from dsi.sampling.noise import ACCEPT, DRAFT, RESIDUAL, exponential, noise_key, uniform
from scripted_choices import ScriptedChoices, exact_distribution

DRAWS = 20_000
Row = np.ndarray


def sampled(probs: np.ndarray, seed: int = 1) -> np.ndarray:
    """The tokens that one distribution gives at many positions."""
    return np.array(match([np.log(probs)] * DRAWS, Sampling(temperature=1.0, seed=seed), position=0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_match_follows_the_target_distribution(seed: int) -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.bincount(sampled(p, seed), minlength=4)
    chi_square = ((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom at 0.1%


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_match_accepts_at_the_rate_of_the_coupling(seed: int) -> None:
    """Daliri, Musco and Suresh (2024): the sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i)."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(6))
    agreed = (sampled(p) == sampled(q)).mean()
    assert agreed == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / DRAWS))
    distance = np.abs(p - q).sum() / 2
    assert expected >= (1 - distance) / (1 + distance)


def test_match_is_independent_of_block_boundaries() -> None:
    rows = np.random.default_rng(0).normal(size=(8, 20)).astype(np.float32)
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=11)
    whole = match(rows, sampling, position=40)
    for start in range(8):
        assert match(rows[start:], sampling, position=40 + start) == whole[start:]


# ---- reject, specinfer and block, by exact enumeration of all random outcomes


Write = Callable[[Tokens, ScriptedChoices], Tokens]  # a text to a longer one


class Uniform:
    """A uniform number on both sides of a probability. Comparing it twice would not be independent."""

    def __init__(self, choices: ScriptedChoices) -> None:
        self.choices, self.compared = choices, False

    def __lt__(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        assert not self.compared
        self.compared = True
        return self.choices.draw([probability, 1 - probability]) == 0


class Noise:
    """Noise under which every token of positive weight is drawn."""

    __array_ufunc__ = None  # so that numpy calls __rtruediv__

    def __init__(self, choices: ScriptedChoices) -> None:
        self.choices = choices

    def __rtruediv__(self, weights: Row) -> "Noise":
        self.weights = weights
        return self

    def argmax(self) -> int:
        return self.choices.draw(self.weights) if self.weights.any() else 0


@cache
def row(model: int, text: Tokens) -> Row:
    """The distribution of a model of three tokens after a text; sometimes a token is impossible."""
    rng = np.random.default_rng([model, len(text), *text])
    weights = rng.dirichlet([0.7] * 3) * (np.arange(3) != rng.integers(9))
    probs: Row = weights / weights.sum()
    probs.flags.writeable = False  # a rule must not modify its inputs
    return probs


target, drafter, another = (partial(row, model) for model in range(3))


def distance(write: Write) -> float:
    """The total variation distance between the texts of four tokens that `write` generates and the target's."""
    texts: dict[Tokens, float] = defaultdict(float, {(): 1.0})
    for length in range(4):
        for text in [text for text in texts if len(text) == length]:
            share = texts.pop(text)
            for longer, probability in exact_distribution(partial(write, text)).items():
                assert len(longer) > length
                texts[longer[:4]] += share * probability
    return sum(abs(texts[text] - likelihood(text)) for text in product(range(3), repeat=4)) / 2


def likelihood(text: Tokens) -> float:
    return math.prod(float(target(text[:i])[token]) for i, token in enumerate(text))


# Each of these draws draft tokens in its own way, and extends the text by a rule.


def one(rule: Any = reject) -> Write:
    def write(text: Tokens, choices: ScriptedChoices) -> Tokens:
        q = drafter(text)
        return *text, rule(target(text), choices.draw(q), q, Uniform(choices), Noise(choices))

    return write


def two(guess: Callable[[Tokens, ScriptedChoices], list[DrawnToken]], rule: Any = specinfer) -> Write:
    def write(text: Tokens, choices: ScriptedChoices) -> Tokens:
        return *text, rule(target(text), guess(text, choices), [Uniform(choices), Uniform(choices)], Noise(choices))

    return write


def two_drafters(text: Tokens, choices: ScriptedChoices) -> list[DrawnToken]:
    """One token from each of two drafters."""
    return [(choices.draw(q), q) for q in (drafter(text), another(text))]


def twins(text: Tokens, choices: ScriptedChoices) -> list[DrawnToken]:
    """Two independent tokens from one drafter."""
    return [(choices.draw(q), q) for q in (drafter(text), drafter(text))]


def distinct(text: Tokens, choices: ScriptedChoices, renormalise: bool = True) -> list[DrawnToken]:
    """Two tokens from one drafter, drawn without replacement."""
    q = drafter(text)
    first = choices.draw(q)
    rest = q * (np.arange(3) != first)
    return [(first, q), (choices.draw(rest), rest / rest.sum() if renormalise else q)]


def top(text: Tokens, _: ScriptedChoices) -> list[DrawnToken]:
    """The drafter's two likeliest tokens."""
    first, second = drafter(text).argsort()[:0:-1].tolist()
    return [(first, None), (second, None)]


def ahead(k: int, rule: Any = block, greedy: bool = False) -> Write:
    def write(text: Tokens, choices: ScriptedChoices) -> Tokens:
        ps, guesses, longer = [], [], text
        for _ in range(k):
            q = drafter(longer)
            token = int(q.argmax()) if greedy else choices.draw(q)
            ps.append(target(longer))
            guesses.append((token, None if greedy else q))
            longer = (*longer, token)
        return *text, *rule(ps, guesses, [Uniform(choices) for _ in ps], lambda _: Noise(choices))

    return write


LOSSLESS = {
    "reject": one(),
    "two drafters": two(two_drafters),
    "one drafter, twice": two(twins),
    "without replacement": two(distinct),
    "the likeliest two": two(top),
    "block of 1": ahead(1),
    "block of 2": ahead(2),
    "block of 3": ahead(3),
    "block of 4": ahead(4),
    "greedy block of 3": ahead(3, greedy=True),
}


@pytest.mark.parametrize("write", LOSSLESS.values(), ids=LOSSLESS)
def test_rules_are_lossless(write: Write) -> None:
    assert distance(write) < 1e-12


def correct_from_p(p: Row, token: int, q: Row, u: float, noise: Any) -> int:
    return token if u < acceptance_probability(p, token, q) else gumbel_argmax(p, noise)


def best_first(p: Row, guesses: list[DrawnToken], uniforms: list[float], noise: Any) -> int:
    return specinfer(p, sorted(guesses, key=lambda guess: -p[guess[0]]), uniforms, noise)


def as_if_drawn(p: Row, guesses: list[DrawnToken], uniforms: list[float], noise: Any) -> int:
    """Treats the two likeliest tokens as draws from a distribution."""
    return specinfer(p, [(token, np.full(3, 1 / 3)) for token, _ in guesses], uniforms, noise)


def one_by_one(ps: list[Row], guesses: list[DrawnToken], uniforms: list[float], noise: Any) -> Tokens:
    """Stops at the first rejected prefix."""
    accepted = prefix_acceptance(ps, guesses)
    for i, (p, guess) in enumerate(zip(ps, guesses)):
        last = i + 1 == len(ps)
        next_mass = 0.0 if last else residual_weights(ps[i + 1], *guesses[i + 1], accepted[i + 1])[1]
        if not uniforms[i] < (accepted[i + 1] if last else backoff_acceptance(accepted[i + 1], next_mass)):
            correction = gumbel_argmax(residual(p, *residual_weights(p, *guess, accepted[i])), noise(i))
            return *(token for token, _ in guesses[:i]), correction
    return tuple(token for token, _ in guesses)


FAULTY = {
    "the correction is drawn from p": one(correct_from_p),
    "the target's favourite is tried first": two(twins, best_first),
    "drawn without replacement but not renormalised": two(partial(distinct, renormalise=False)),
    "the likeliest tokens are treated as draws": two(top, as_if_drawn),
    "a block stops at the first rejected prefix": ahead(3, one_by_one),
}


@pytest.mark.parametrize("write", FAULTY.values(), ids=FAULTY)
def test_enumeration_detects_faulty_rules(write: Write) -> None:
    assert distance(write) > 1e-3


PLANTED = {
    "no residual": ("residual", lambda p, _, __: p),
    "residual not renormalised": ("residual", lambda _, weights, __: weights),
    "residual ignores the prefix": ("residual_weights", lambda p, token, q, _=1.0: residual_weights(p, token, q)),
    "residual not clipped at 0": ("residual_weights", lambda p, _, q, prefix=1.0: (abs(prefix * p - q), 1.0)),
    "acceptance ignores the prefix": (
        "acceptance_probability",
        lambda p, token, q, _=1.0: acceptance_probability(p, token, q),
    ),
    "backoff ignores the residual mass": ("backoff_acceptance", lambda prefix, _: prefix),
}
DETECTED_BY = {"residual not renormalised": ["specinfer"], "backoff ignores the residual mass": ["block"]} | {
    fault: ["block"] for fault in PLANTED if fault.endswith("ignores the prefix")
}


@pytest.mark.parametrize("fault", PLANTED)
def test_enumeration_detects_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, *PLANTED[fault])
    writers = {"reject": one(), "specinfer": two(two_drafters), "block": ahead(3)}
    detected = [name for name, write in writers.items() if distance(write) > 1e-3]
    assert detected == DETECTED_BY.get(fault, ["reject", "specinfer", "block"])


def test_block_accepts_more_than_reject() -> None:
    """The example of Sun et al. (2025): `reject` accepts 10/9 of two guesses, `block` 11/9."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])

    def accepted(rule: Callable[[list[DrawnToken], ScriptedChoices], Tokens], choices: ScriptedChoices) -> int:
        guesses: list[DrawnToken] = [(choices.draw(q), q), (choices.draw(q), q)]
        agree = [token == guess for token, (guess, _) in zip(rule(guesses, choices), guesses)]
        return [*agree, False].index(False)

    def singly(guesses: list[DrawnToken], choices: ScriptedChoices) -> Tokens:
        return tuple(reject(p, *guess, cast(Any, Uniform(choices)), Noise(choices)) for guess in guesses)

    def together(guesses: list[DrawnToken], choices: ScriptedChoices) -> Tokens:
        return block([p, p], guesses, cast(Any, [Uniform(choices), Uniform(choices)]), lambda _: Noise(choices))

    mean = {
        rule: sum(n * w for n, w in exact_distribution(partial(accepted, rule)).items()) for rule in (singly, together)
    }
    assert mean == {singly: pytest.approx(10 / 9, abs=1e-12), together: pytest.approx(11 / 9, abs=1e-12)}


# ---- with keyed random numbers


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_reject_with_keyed_numbers_follows_the_target_distribution(seed: int) -> None:
    """Draft token, acceptance and correction, each with its own key, at many positions."""
    p, q, ids = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), np.arange(4)

    def write(at: int) -> int:
        guess = gumbel_argmax(q, exponential(noise_key(seed, at, DRAFT), ids))
        return reject(
            p, guess, q, uniform(noise_key(seed, at, ACCEPT)), exponential(noise_key(seed, at, RESIDUAL), ids)
        )

    counts = np.bincount([write(at) for at in range(DRAWS)], minlength=4)
    assert ((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum() < 16.27  # 3 degrees of freedom at 0.1%


@st.composite
def rows(draw: st.DrawFn, size: int = 5) -> Row:
    """Distributions with zeros and ties, often equal in parts."""
    weights = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
    return np.array(weights) / sum(weights)


@st.composite
def guesses(draw: st.DrawFn, count: int = 3) -> list[DrawnToken]:
    """Tokens, each with the distribution it was drawn from, or None."""
    drafted: list[DrawnToken] = []
    for _ in range(count):
        q = draw(rows())
        token = draw(st.sampled_from(np.flatnonzero(q).tolist()))
        drafted.append((token, draw(st.sampled_from([q, None]))))
    return drafted


seeds = st.integers(0, 2**32)


def random_numbers(seed: int) -> tuple[list[float], Callable[[int], Row]]:
    """Uniforms and residual noise for three positions."""
    uniforms = [uniform(noise_key(seed, i, ACCEPT)) for i in range(3)]
    return uniforms, lambda i: np.asarray(exponential(noise_key(seed, i, RESIDUAL), np.arange(5)))


def tensors(guesses: list[DrawnToken]) -> list[DrawnToken]:
    return [(token, None if q is None else torch.from_numpy(q)) for token, q in guesses]


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_rules_agree_in_numpy_and_torch(ps: list[Row], guesses: list[DrawnToken], seed: int) -> None:
    uniforms, noise = random_numbers(seed)
    torch_ps, torch_guesses = [torch.from_numpy(p) for p in ps], tensors(guesses)
    torch_noise = torch.from_numpy(noise(0))
    assert reject(ps[0], *guesses[0], uniforms[0], noise(0)) == reject(
        torch_ps[0], *torch_guesses[0], uniforms[0], torch_noise
    )
    assert specinfer(ps[0], guesses, uniforms, noise(0)) == specinfer(torch_ps[0], torch_guesses, uniforms, torch_noise)
    assert block(ps, guesses, uniforms, noise) == block(
        torch_ps, torch_guesses, uniforms, lambda i: torch.from_numpy(noise(i))
    )


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_rules_never_output_impossible_tokens(ps: list[Row], guesses: list[DrawnToken], seed: int) -> None:
    uniforms, noise = random_numbers(seed)
    assert ps[0][specinfer(ps[0], guesses, uniforms, noise(0))] > 0
    assert all(p[token] > 0 for p, token in zip(ps, block(ps, guesses, uniforms, noise)))


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_rules_treat_none_as_a_point_mass(ps: list[Row], guesses: list[DrawnToken], seed: int) -> None:
    uniforms, noise = random_numbers(seed)
    short: list[DrawnToken] = [(token, None) for token, _ in guesses]
    spelled: list[DrawnToken] = [(token, np.eye(5)[token]) for token, _ in guesses]
    assert specinfer(ps[0], short, uniforms, noise(0)) == specinfer(ps[0], spelled, uniforms, noise(0))
    assert block(ps, short, uniforms, noise) == block(ps, spelled, uniforms, noise)


@given(guesses(), seeds)
def test_rules_accept_draws_from_the_target(guesses: list[DrawnToken], seed: int) -> None:
    uniforms, noise = random_numbers(seed)
    ps = [np.eye(5)[token] if q is None else q for token, q in guesses]
    assert specinfer(ps[0], guesses, uniforms, noise(0)) == guesses[0][0]
    assert block(ps, guesses, uniforms, noise) == tuple(token for token, _ in guesses)


@given(rows(), rows(), seeds)
def test_rules_reject_tokens_the_target_excludes(p: Row, q: Row, seed: int) -> None:
    uniforms, noise = random_numbers(seed)
    p, q, guess = np.append(p, np.zeros(5)), np.append(np.zeros(5), q), 5 + int(q.argmax())
    exp = np.append(noise(0), noise(1))
    free = gumbel_argmax(p, exp)
    assert reject(p, guess, q, uniforms[0], exp) == specinfer(p, [(guess, q)] * 3, uniforms, exp) == free
    assert block([p] * 3, [(guess, q)] * 3, uniforms, lambda _: exp) == (free,)


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_block_draws_noise_only_for_a_correction(ps: list[Row], guesses: list[DrawnToken], seed: int) -> None:
    uniforms, noise = random_numbers(seed)
    asked: list[int] = []
    written = block(ps, guesses, uniforms, lambda i: asked.append(i) or noise(i))  # type: ignore[func-returns-value]
    # A correction never equals the rejected guess, so an output equal to the draft was accepted whole.
    assert asked == ([] if written == tuple(token for token, _ in guesses) else [len(written) - 1])


def test_rules_without_guesses_sample_the_target() -> None:
    p, noise = np.array([0.5, 0.5]), np.array([2.0, 1.0])
    assert specinfer(p, [], [], noise) == 1
    assert block([], [], [], lambda _: noise) == ()


def test_residual_without_mass_is_the_target() -> None:
    p = np.array([0.5, 0.5])
    assert residual(p, *residual_weights(p, 0, p)).tolist() == [0.5, 0.5]
    assert backoff_acceptance(1.0, 0.0) == 1


def test_reject_refuses_a_guess_of_probability_zero() -> None:
    p, q = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    with pytest.raises(ValueError, match="token 1 was guessed"):
        reject(p, 1, q, 0.5, p)


def test_rules_refuse_guesses_without_uniforms() -> None:
    p = np.array([0.5, 0.5])
    with pytest.raises(ValueError, match="shorter"):
        specinfer(p, [(0, None), (1, None)], [0.9], p)
    with pytest.raises(IndexError):
        block([p, p], [(0, None), (1, None)], [0.9], lambda _: p)


# ---- acceptance rates


def match_rate_by_definition(p: Row, q: Row) -> float:
    both = np.flatnonzero(p * q)
    return float(sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both))


@given(rows(), rows())
def test_acceptance_rates_equal_their_definitions(p: Row, q: Row) -> None:
    expected = exact_distribution(
        lambda choices: reject(p, guess := choices.draw(q), q, cast(Any, Uniform(choices)), Noise(choices)) == guess
    )
    assert rejection_acceptance_rate(p, q) == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=1e-12)
    assert rejection_acceptance_rate(p, q) == pytest.approx(expected.get(True, 0.0), abs=1e-12)
    assert match_acceptance_rate(p, q) == pytest.approx(match_rate_by_definition(p, q), abs=1e-12)
    assert match_acceptance_rate(p, q) <= rejection_acceptance_rate(p, q) + 1e-12
    assert rejection_acceptance_rate(p, q) <= 1


def test_acceptance_rates_of_a_large_vocabulary() -> None:
    p, q = np.random.default_rng(0).dirichlet(np.full(1000, 0.05), 2)  # many tokens next to impossible
    assert match_acceptance_rate(p, q) == pytest.approx(match_rate_by_definition(p, q), rel=1e-12)
    assert match_acceptance_rate(torch.from_numpy(p), torch.from_numpy(q)) == pytest.approx(
        match_acceptance_rate(p, q), rel=1e-12
    )
    assert rejection_acceptance_rate(torch.from_numpy(p), torch.from_numpy(q)) == pytest.approx(
        rejection_acceptance_rate(p, q), rel=1e-12
    )
