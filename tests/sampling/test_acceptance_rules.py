"""The rules: the text is the target's own, or exactly as likely, and acceptance is what theory says."""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsi.core.messages import Sampling
from dsi.sampling import acceptance_rules as rules
from dsi.sampling.acceptance_rules import (
    Guess,
    accepts,
    block,
    chance,
    coupled,
    excess,
    holds,
    match,
    reject,
    residual,
    several,
    standing,
)
from dsi.sampling.logits import race
from dsi.sampling.noise import ACCEPT, DRAFT, RESIDUAL, coin, exponential, key
from fate import Fate, law

DRAWS = 20_000
Row = np.ndarray
Tokenizer = tuple[int, ...]


def drawn(row: np.ndarray, seed: int = 1) -> np.ndarray:
    """The tokens that one row of probabilities gives at many positions."""
    return np.array(match([np.log(row)] * DRAWS, Sampling(temperature=1.0, seed=seed), position=0))


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_follow_the_targets_distribution(seed: int) -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.bincount(drawn(p, seed), minlength=4)
    chi_square = ((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom at 0.1%


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_two_models_agree_as_often_as_the_coupling_promises(seed: int) -> None:
    """Daliri, Musco and Suresh (2024): the sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i)."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    promised = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(6))
    agreed = (drawn(p) == drawn(q)).mean()
    assert agreed == pytest.approx(promised, abs=4 * math.sqrt(promised * (1 - promised) / DRAWS))
    distance = np.abs(p - q).sum() / 2
    assert promised >= (1 - distance) / (1 + distance)


def test_a_place_has_one_answer_whichever_block_it_is_judged_in() -> None:
    rows = np.random.default_rng(0).normal(size=(8, 20)).astype(np.float32)
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=11)
    whole = match(rows, sampling, position=40)
    for start in range(8):
        assert match(rows[start:], sampling, position=40 + start) == whole[start:]


# ---- reject, several and block, by exact enumeration of what chance can do


Write = Callable[[Tokenizer, Fate], Tokenizer]  # a text to a longer one


class Coin:
    """A coin that both may and may not fall below a chance. Twice the same coin would not be independent."""

    def __init__(self, fate: Fate) -> None:
        self.fate, self.tossed = fate, False

    def __lt__(self, chance: float) -> bool:
        assert 0 <= chance <= 1
        assert not self.tossed
        self.tossed = True
        return self.fate.draw([chance, 1 - chance]) == 0


class Noise:
    """Noise with which each token that can win a race does."""

    __array_ufunc__ = None  # so that numpy asks us to divide

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    def __rtruediv__(self, weights: Row) -> "Noise":
        self.weights = weights
        return self

    def argmax(self) -> int:
        return self.fate.draw(self.weights) if self.weights.any() else 0


@cache
def row(model: int, text: Tokenizer) -> Row:
    """What a model of three tokens says after a text; now and then a token is impossible."""
    rng = np.random.default_rng([model, len(text), *text])
    weights = rng.dirichlet([0.7] * 3) * (np.arange(3) != rng.integers(9))
    probs: Row = weights / weights.sum()
    probs.flags.writeable = False  # a rule may not write into its rows
    return probs


target, drafter, another = (partial(row, model) for model in range(3))


def distance(write: Write) -> float:
    """How far the texts of four tokens that `write` writes are from the target's, in total variation."""
    texts: dict[Tokenizer, float] = defaultdict(float, {(): 1.0})
    for length in range(4):
        for text in [text for text in texts if len(text) == length]:
            share = texts.pop(text)
            for longer, probability in law(partial(write, text)).items():
                assert len(longer) > length
                texts[longer[:4]] += share * probability
    return sum(abs(texts[text] - likelihood(text)) for text in product(range(3), repeat=4)) / 2


def likelihood(text: Tokenizer) -> float:
    return math.prod(float(target(text[:i])[token]) for i, token in enumerate(text))


# Each of these says how guesses are made, and writes on by a rule.


def one(rule: Any = reject) -> Write:
    def write(text: Tokenizer, fate: Fate) -> Tokenizer:
        q = drafter(text)
        return *text, rule(target(text), fate.draw(q), q, Coin(fate), Noise(fate))

    return write


def two(guess: Callable[[Tokenizer, Fate], list[Guess]], rule: Any = several) -> Write:
    def write(text: Tokenizer, fate: Fate) -> Tokenizer:
        return *text, rule(target(text), guess(text, fate), [Coin(fate), Coin(fate)], Noise(fate))

    return write


def apart(text: Tokenizer, fate: Fate) -> list[Guess]:
    """Each by a drafter of its own."""
    return [(fate.draw(q), q) for q in (drafter(text), another(text))]


def twins(text: Tokenizer, fate: Fate) -> list[Guess]:
    """Both by one drafter, which may say the same twice."""
    return [(fate.draw(q), q) for q in (drafter(text), drafter(text))]


def distinct(text: Tokenizer, fate: Fate, renormalise: bool = True) -> list[Guess]:
    """Both by one drafter, which does not say the same twice."""
    q = drafter(text)
    first = fate.draw(q)
    rest = q * (np.arange(3) != first)
    return [(first, q), (fate.draw(rest), rest / rest.sum() if renormalise else q)]


def top(text: Tokenizer, _: Fate) -> list[Guess]:
    """The drafter's two likeliest."""
    first, second = drafter(text).argsort()[:0:-1].tolist()
    return [(first, None), (second, None)]


def ahead(k: int, rule: Any = block, greedy: bool = False) -> Write:
    def write(text: Tokenizer, fate: Fate) -> Tokenizer:
        ps, guesses, longer = [], [], text
        for _ in range(k):
            q = drafter(longer)
            token = int(q.argmax()) if greedy else fate.draw(q)
            ps.append(target(longer))
            guesses.append((token, None if greedy else q))
            longer = (*longer, token)
        return *text, *rule(ps, guesses, [Coin(fate) for _ in ps], lambda _: Noise(fate))

    return write


LOSSLESS = {
    "reject": one(),
    "two drafters": two(apart),
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
def test_the_text_is_exactly_as_likely_as_the_target_makes_it(write: Write) -> None:
    assert distance(write) < 1e-12


def correct_from_p(p: Row, token: int, q: Row, coin: float, noise: Any) -> int:
    return token if coin < chance(p, token, q) else race(p, noise)


def best_first(p: Row, guesses: list[Guess], coins: list[float], noise: Any) -> int:
    return several(p, sorted(guesses, key=lambda guess: -p[guess[0]]), coins, noise)


def as_if_drawn(p: Row, guesses: list[Guess], coins: list[float], noise: Any) -> int:
    """Takes the likeliest two for draws from a row."""
    return several(p, [(token, np.full(3, 1 / 3)) for token, _ in guesses], coins, noise)


def one_by_one(ps: list[Row], guesses: list[Guess], coins: list[float], noise: Any) -> Tokenizer:
    """Stops at the first start that falls."""
    chances = standing(ps, guesses)
    for i, (p, guess) in enumerate(zip(ps, guesses)):
        last = i + 1 == len(ps)
        next_mass = 0.0 if last else excess(ps[i + 1], *guesses[i + 1], chances[i + 1])[1]
        if not coins[i] < (chances[i + 1] if last else holds(chances[i + 1], next_mass)):
            drawn = race(residual(p, *excess(p, *guess, chances[i])), noise(i))
            return *(token for token, _ in guesses[:i]), drawn
    return tuple(token for token, _ in guesses)


FAULTY = {
    "the correction is drawn from p": one(correct_from_p),
    "the target's favourite is tried first": two(twins, best_first),
    "tokens are taken out but the rest is not renormalised": two(partial(distinct, renormalise=False)),
    "the likeliest are taken for draws": two(top, as_if_drawn),
    "a block stops at the first start that falls": ahead(3, one_by_one),
}


@pytest.mark.parametrize("write", FAULTY.values(), ids=FAULTY)
def test_the_enumeration_catches_a_faulty_rule(write: Write) -> None:
    assert distance(write) > 1e-3


PLANTED = {
    "no residual": ("residual", lambda p, _, __: p),
    "residual not renormalised": ("residual", lambda _, left, __: left),
    "excess forgets the block": ("excess", lambda p, token, q, _=1.0: excess(p, token, q)),
    "excess not cut at 0": ("excess", lambda p, _, q, before=1.0: (abs(before * p - q), 1.0)),
    "chance forgets the block": ("chance", lambda p, token, q, _=1.0: chance(p, token, q)),
    "a start holds as it stands": ("holds", lambda standing, _: standing),
}
FOUND_BY = {"residual not renormalised": ["several"], "a start holds as it stands": ["block"]} | {
    fault: ["block"] for fault in PLANTED if fault.endswith("forgets the block")
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_enumeration_catches_a_fault_in_our_own_rules(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, *PLANTED[fault])
    writers = {"reject": one(), "several": two(apart), "block": ahead(3)}
    found = [name for name, write in writers.items() if distance(write) > 1e-3]
    assert found == FOUND_BY.get(fault, ["reject", "several", "block"])


def test_a_block_accepts_more_than_its_guesses_one_by_one() -> None:
    """The example of Sun et al. (2025): 10/9 of two guesses by `reject`, and 11/9 by `block`."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])

    def accepted(rule: Callable[[list[Guess], Fate], Tokenizer], fate: Fate) -> int:
        guesses: list[Guess] = [(fate.draw(q), q), (fate.draw(q), q)]
        agree = [token == guess for token, (guess, _) in zip(rule(guesses, fate), guesses)]
        return [*agree, False].index(False)

    def singly(guesses: list[Guess], fate: Fate) -> Tokenizer:
        return tuple(reject(p, *guess, cast(Any, Coin(fate)), Noise(fate)) for guess in guesses)

    def together(guesses: list[Guess], fate: Fate) -> Tokenizer:
        return block([p, p], guesses, cast(Any, [Coin(fate), Coin(fate)]), lambda _: Noise(fate))

    mean = {rule: sum(n * w for n, w in law(partial(accepted, rule)).items()) for rule in (singly, together)}
    assert mean == {singly: pytest.approx(10 / 9, abs=1e-12), together: pytest.approx(11 / 9, abs=1e-12)}


# ---- with real coins and noise


@pytest.mark.parametrize("seed", [1, 2])
def test_real_coins_give_the_targets_distribution(seed: int) -> None:
    """Guess, coin and correction, each by a key of its own, at many positions."""
    p, q, ids = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), np.arange(4)

    def write(at: int) -> int:
        guess = race(q, exponential(key(seed, at, DRAFT), ids))
        return reject(p, guess, q, coin(key(seed, at, ACCEPT)), exponential(key(seed, at, RESIDUAL), ids))

    counts = np.bincount([write(at) for at in range(DRAWS)], minlength=4)
    assert ((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum() < 16.27  # 3 degrees of freedom at 0.1%


@st.composite
def rows(draw: st.DrawFn, size: int = 5) -> Row:
    """Rows with zeros and ties, and often equal to one another in parts."""
    weights = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
    return np.array(weights) / sum(weights)


@st.composite
def guesses(draw: st.DrawFn, count: int = 3) -> list[Guess]:
    """Tokens with the row each came from, or None."""
    made: list[Guess] = []
    for _ in range(count):
        q = draw(rows())
        token = draw(st.sampled_from(np.flatnonzero(q).tolist()))
        made.append((token, draw(st.sampled_from([q, None]))))
    return made


seeds = st.integers(0, 2**32)


def luck(seed: int) -> tuple[list[float], Callable[[int], Row]]:
    """Three coins, and the noise of three places."""
    coins = [coin(key(seed, i, ACCEPT)) for i in range(3)]
    return coins, lambda i: np.asarray(exponential(key(seed, i, RESIDUAL), np.arange(5)))


def tensors(guesses: list[Guess]) -> list[Guess]:
    return [(token, None if q is None else torch.from_numpy(q)) for token, q in guesses]


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_numpy_and_torch_write_the_same_tokens(ps: list[Row], guesses: list[Guess], seed: int) -> None:
    coins, noise = luck(seed)
    others, same = [torch.from_numpy(p) for p in ps], tensors(guesses)
    there = torch.from_numpy(noise(0))
    assert reject(ps[0], *guesses[0], coins[0], noise(0)) == reject(others[0], *same[0], coins[0], there)
    assert several(ps[0], guesses, coins, noise(0)) == several(others[0], same, coins, there)
    assert block(ps, guesses, coins, noise) == block(others, same, coins, lambda i: torch.from_numpy(noise(i)))


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_what_the_target_excludes_is_never_written(ps: list[Row], guesses: list[Guess], seed: int) -> None:
    coins, noise = luck(seed)
    assert ps[0][several(ps[0], guesses, coins, noise(0))] > 0
    assert all(p[token] > 0 for p, token in zip(ps, block(ps, guesses, coins, noise)))


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_a_point_mass_is_a_row_with_one_token(ps: list[Row], guesses: list[Guess], seed: int) -> None:
    coins, noise = luck(seed)
    short: list[Guess] = [(token, None) for token, _ in guesses]
    spelled: list[Guess] = [(token, np.eye(5)[token]) for token, _ in guesses]
    assert several(ps[0], short, coins, noise(0)) == several(ps[0], spelled, coins, noise(0))
    assert block(ps, short, coins, noise) == block(ps, spelled, coins, noise)


@given(guesses(), seeds)
def test_a_guess_from_the_targets_own_row_stands(guesses: list[Guess], seed: int) -> None:
    coins, noise = luck(seed)
    ps = [np.eye(5)[token] if q is None else q for token, q in guesses]
    assert several(ps[0], guesses, coins, noise(0)) == guesses[0][0]
    assert block(ps, guesses, coins, noise) == tuple(token for token, _ in guesses)


@given(rows(), rows(), seeds)
def test_a_guess_the_target_excludes_falls(p: Row, q: Row, seed: int) -> None:
    coins, noise = luck(seed)
    p, q, guess = np.append(p, np.zeros(5)), np.append(np.zeros(5), q), 5 + int(q.argmax())
    exp = np.append(noise(0), noise(1))
    free = race(p, exp)
    assert reject(p, guess, q, coins[0], exp) == several(p, [(guess, q)] * 3, coins, exp) == free
    assert block([p] * 3, [(guess, q)] * 3, coins, lambda _: exp) == (free,)


@given(st.lists(rows(), min_size=3, max_size=3), guesses(), seeds)
def test_a_block_asks_for_noise_only_where_it_draws(ps: list[Row], guesses: list[Guess], seed: int) -> None:
    coins, noise = luck(seed)
    asked: list[int] = []
    written = block(ps, guesses, coins, lambda i: asked.append(i) or noise(i))  # type: ignore[func-returns-value]
    # A correction is never the guess that fell, so a block that reads like its guesses was accepted.
    assert asked == ([] if written == tuple(token for token, _ in guesses) else [len(written) - 1])


def test_nothing_guessed_leaves_the_target_to_itself() -> None:
    p, noise = np.array([0.5, 0.5]), np.array([2.0, 1.0])
    assert several(p, [], [], noise) == 1
    assert block([], [], [], lambda _: noise) == ()


def test_a_residual_of_nothing_is_the_target_itself() -> None:
    p = np.array([0.5, 0.5])
    assert residual(p, *excess(p, 0, p)).tolist() == [0.5, 0.5]
    assert holds(1.0, 0.0) == 1


def test_a_guess_that_could_not_be_drawn_is_refused() -> None:
    p, q = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    with pytest.raises(ValueError, match="token 1 was guessed"):
        reject(p, 1, q, 0.5, p)


def test_a_guess_without_a_coin_is_refused() -> None:
    p = np.array([0.5, 0.5])
    with pytest.raises(ValueError, match="shorter"):
        several(p, [(0, None), (1, None)], [0.9], p)
    with pytest.raises(IndexError):
        block([p, p], [(0, None), (1, None)], [0.9], lambda _: p)


# ---- how often guesses are accepted


def slowly_coupled(p: Row, q: Row) -> float:
    both = np.flatnonzero(p * q)
    return float(sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both))


@given(rows(), rows())
def test_acceptance_is_what_its_definition_says(p: Row, q: Row) -> None:
    promised = law(lambda fate: reject(p, guess := fate.draw(q), q, cast(Any, Coin(fate)), Noise(fate)) == guess)
    assert accepts(p, q) == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=1e-12)
    assert accepts(p, q) == pytest.approx(promised.get(True, 0.0), abs=1e-12)
    assert coupled(p, q) == pytest.approx(slowly_coupled(p, q), abs=1e-12)
    assert coupled(p, q) <= accepts(p, q) + 1e-12
    assert accepts(p, q) <= 1


def test_acceptance_of_a_large_vocabulary() -> None:
    p, q = np.random.default_rng(0).dirichlet(np.full(1000, 0.05), 2)  # many tokens next to impossible
    assert coupled(p, q) == pytest.approx(slowly_coupled(p, q), rel=1e-12)
    assert coupled(torch.from_numpy(p), torch.from_numpy(q)) == pytest.approx(coupled(p, q), rel=1e-12)
    assert accepts(torch.from_numpy(p), torch.from_numpy(q)) == pytest.approx(accepts(p, q), rel=1e-12)
