"""Counter-based random numbers: a function of (seed, position, token), bit-identical in numpy and torch.

splitmix64 gives the bits. The exponential is computed from them with additions, multiplications and
divisions alone, which IEEE 754 rounds in exactly one way; a library's `log` may differ in its last bit
between machines, and one bit can change a token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any  # a numpy array or a torch tensor
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64 (Steele, Lea and Flood, 2014)
UINT64_MAX = (1 << 64) - 1
LN2 = 0.6931471805599453
LOG_ERROR = 1e-9  # far more than the relative error of any library's logarithm, and than tokens are ever close
NO_NUMBERS = "the model's logits are not numbers: it may overflow in this dtype"
CANDIDATES = 4  # of a row, that are looked at in exact arithmetic
TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # the random decisions at one position; each has its own key


def array_namespace(array: Array) -> Any:
    """Return the module (numpy or torch) whose functions take this array."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def noise_key(seed: int, position: int, purpose: int = TOKEN, block: int = 0) -> int:
    """Derive the 64-bit key of one random decision at one position.

    A rule that decides more than the token uses one key per purpose, and one per block (or per draft token
    of several) in which the position is verified.
    """
    key = splitmix64(splitmix64(seed & UINT64_MAX) ^ (position * GOLDEN_GAMMA & UINT64_MAX))
    stream = (block << 8 | purpose) & UINT64_MAX
    return splitmix64(key ^ splitmix64(stream)) if stream else key  # stream 0 keeps the texts of old seeds


def uniform(key: int) -> float:
    """Draw from the uniform distribution on the open interval (0, 1)."""
    # The complement, because splitmix64(key) is already the noise of token 1.
    return float(_open_unit(splitmix64(~key & UINT64_MAX) >> 12))


def exponential(key: int, tokens: Array) -> Array:
    """Draw from Exp(1), in float64, for each token id of an int64 array."""
    bits = _mix_array(tokens * _as_int64(GOLDEN_GAMMA) + _as_int64(key))
    return _neg_log(_open_unit(float64(_logical_shift(bits, 12))))


def exponential_noise(logits: Array, key: int) -> Array:
    """Draw from Exp(1) for every token of a row of logits or probabilities, on the same device."""
    xp = array_namespace(logits)
    return exponential(key, xp.arange(len(logits), dtype=xp.int64, device=logits.device))


def race(probs: np.ndarray, key: int, count: int = 1) -> np.ndarray:
    """The `count` tokens with the largest p / e, for the exponentials e of this key, in order; ties by number.

    The library's logarithm is several times as fast as ours, and wrong in its last bits at most: it only says which
    tokens can be among them, and their exponentials alone are computed as on every machine.
    """
    ratios = probs / -np.log(_open_unit(_bits(key, len(probs)).astype(np.float64)))
    least = ratios.max() if count == 1 else np.partition(ratios, -count)[-count]
    tokens = np.flatnonzero(ratios >= least * (1 - LOG_ERROR))
    if len(tokens) == count == 1:
        return tokens
    if not len(tokens):
        raise ValueError(NO_NUMBERS)
    order = (-probs[tokens] / exponential(key, tokens)).argsort(kind="stable")
    winners: np.ndarray = tokens[order[:count]]
    return winners


def _bits(key: int, count: int) -> np.ndarray:
    """The 52 random bits of the first tokens."""
    x = _counters(count) + np.uint64(key)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(12)
    return x


@lru_cache(maxsize=4)
def _counters(count: int) -> np.ndarray:
    """The multiples of splitmix64's increment, by token."""
    return np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)


def race_of_rows(weights: Array, keys: Sequence[int]) -> tuple[int, ...]:
    """As `race` for each row of a torch tensor on a device, all at once: what is computed there waits for nothing."""
    torch = array_namespace(weights)
    column = torch.tensor([_as_int64(key) for key in keys], dtype=torch.int64, device=weights.device)[:, None]
    tokens = torch.arange(weights.shape[-1], device=weights.device) * _as_int64(GOLDEN_GAMMA)
    ratios = weights / -torch.log(_open_unit(float64(_logical_shift(_mix_array(tokens + column), 12))))
    ratios, best = ratios.topk(min(CANDIDATES, ratios.shape[-1]))
    candidates = torch.stack((ratios, float64(best), weights.gather(-1, best)), 1).cpu().numpy()
    winners: list[int] = candidates[:, 1, 0].astype(np.int64).tolist()
    for i in _unclear(candidates[:, 0]):
        winners[i] = _winner(candidates[i], keys[i], weights[i])
    return tuple(winners)


def _unclear(ratios: np.ndarray) -> list[int]:
    """The rows whose winner only exact arithmetic can tell, by their largest ratios in order: few, and no numbers."""
    if ratios.shape[-1] < 2:
        return list(range(len(ratios)))
    rows: list[int] = np.flatnonzero(~(ratios[:, 1] < ratios[:, 0] * (1 - LOG_ERROR))).tolist()
    return rows


def _winner(candidates: np.ndarray, key: int, weights: Array) -> int:
    """Of the largest ratios of a row, in order, which is the largest in exact arithmetic."""
    ratios, tokens = candidates[0], candidates[1].astype(np.int64)
    if np.isnan(ratios[0]):
        raise ValueError(NO_NUMBERS)
    close = ratios >= ratios[0] * (1 - LOG_ERROR)
    if close[-1] and len(close) < len(weights):
        return int(race(weights.cpu().numpy(), key)[0])  # there may be more of them
    tokens, own = tokens[close], candidates[2][close]
    order = tokens.argsort()
    return int(tokens[order][(own[order] / exponential(key, tokens[order])).argmax()])


def _open_unit(bits: Array) -> Array:
    """Map 52 bits, plus one half, exactly into the open interval (0, 1)."""
    return bits * 2.0**-52 + 2.0**-53


def _neg_log(u: Array) -> Array:
    """-ln(u) by ln m = 2 artanh((m - 1) / (m + 1)) for m in [sqrt(1/2), sqrt(2)), to 1e-16."""
    mantissa, exponent = array_namespace(u).frexp(u)
    low = mantissa < 0.7071067811865476
    mantissa = mantissa + mantissa * low
    exponent = exponent - low * 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * 0.0
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return -(float64(exponent) * LN2 + 2.0 * s * series)


def float64(x: Array) -> Array:
    """Convert explicitly: in torch, a product of a float32 tensor and a Python float stays float32."""
    xp = array_namespace(x)
    return xp.asarray(x, dtype=xp.float64)


def splitmix64(x: int) -> int:
    """One step of the splitmix64 generator: a well-mixed 64-bit hash of `x`."""
    x = (x + GOLDEN_GAMMA) & UINT64_MAX
    x = (x ^ (x >> 30)) * MIX_1 & UINT64_MAX
    x = (x ^ (x >> 27)) * MIX_2 & UINT64_MAX
    return x ^ (x >> 31)


def _mix_array(x: Array) -> Array:
    """splitmix64's finalizer on an int64 array, whose products wrap and whose shifts keep the sign."""
    x = (x ^ _logical_shift(x, 30)) * _as_int64(MIX_1)
    x = (x ^ _logical_shift(x, 27)) * _as_int64(MIX_2)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Array, by: int) -> Array:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _as_int64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
