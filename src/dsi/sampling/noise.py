"""Random numbers that are a function of (seed, position, token), equal to the bit in numpy and torch.

An integer hash gives the bits; the exponential is computed from them with additions, multiplications and
divisions alone, each of which IEEE 754 rounds in one way only. A library's `log` would differ in its
last bit from machine to machine, and one bit can change a token.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = Any  # a numpy array or a torch tensor
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64 (Steele, Lea and Flood, 2014)
WORD = (1 << 64) - 1
LN2 = 0.6931471805599453
TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # what chance decides at a position: each has numbers of its own


def namespace(array: Array) -> Any:
    """The module whose functions this array takes."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def key(seed: int, position: int, purpose: int = TOKEN, block: int = 0) -> int:
    """One 64-bit number for all the tokens that could stand at this position.

    A rule that decides more than the token takes a key for each purpose, and one for each block (or each
    of several guesses) in which the position is judged.
    """
    here = scramble(scramble(seed & WORD) ^ (position * GOLDEN & WORD))
    aside = (block << 8 | purpose) & WORD
    return scramble(here ^ scramble(aside)) if aside else here  # texts of old seeds stay as they were


def coin(key: int) -> float:
    """A number drawn evenly from between 0 and 1."""
    # The complement, because scramble(key) is already the noise of token 1.
    return float(_between(scramble(~key & WORD) >> 12))


def exponential(key: int, tokens: Array) -> Array:
    """A draw from Exp(1), float64, for each token id of an int64 array."""
    bits = _scramble_all(tokens * _signed(GOLDEN) + _signed(key))
    return _minus_log(_between(double(_shift(bits, 12))))


def _between(bits: Array) -> Array:
    """52 bits and a half: strictly between 0 and 1, and exact."""
    return bits * 2.0**-52 + 2.0**-53


def _minus_log(u: Array) -> Array:
    """-ln(u) by ln m = 2 artanh((m - 1) / (m + 1)) for m in [sqrt(1/2), sqrt(2)), to 1e-16."""
    mantissa, exponent = namespace(u).frexp(u)
    low = mantissa < 0.7071067811865476
    mantissa = mantissa + mantissa * low
    exponent = exponent - low * 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * 0.0
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return -(double(exponent) * LN2 + 2.0 * s * series)


def double(x: Array) -> Array:
    """Spelled out: a product with a Python float is a float32 in torch."""
    xp = namespace(x)
    return xp.asarray(x, dtype=xp.float64)


def scramble(x: int) -> int:
    """A 64-bit number, well mixed."""
    x = (x + GOLDEN) & WORD
    x = (x ^ (x >> 30)) * FIRST & WORD
    x = (x ^ (x >> 27)) * SECOND & WORD
    return x ^ (x >> 31)


def _scramble_all(x: Array) -> Array:
    """The same on an int64 array, whose products wrap and whose shifts keep the sign."""
    x = (x ^ _shift(x, 30)) * _signed(FIRST)
    x = (x ^ _shift(x, 27)) * _signed(SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Array, by: int) -> Array:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
