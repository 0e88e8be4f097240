"""How long a server may be silent at work before it counts as dead."""

from __future__ import annotations

FACTOR = 10.0  # times the slowest forward of the same size
MIN_SECONDS = 2.0  # a busy machine can keep a worker waiting for a core
UNMEASURED_SECONDS = 60.0  # before the first forward of a role
FIRST_SECONDS = 10.0  # likewise at the least where its latency is expected: weights may have to be read from a disk
FADE = 0.99  # of the slowest forward with each one after it, so that one bad moment is forgotten


class HangLimits:
    """Learns from every forward; `given` replaces what is measured."""

    def __init__(self, given: float | None = None) -> None:
        self._given = given
        self._slowest: dict[str, dict[int, float]] = {}  # of each role: seconds by size, a power of two of new tokens
        self._expected: dict[str, float] = {}  # of each role: seconds of a forward over one token

    def expect(self, role: str, seconds: float) -> None:
        """A forward over one token is known, from an earlier run say, to take so long."""
        self._expected[role] = seconds

    def observe(self, role: str, num_new: int, seconds: float) -> None:
        slowest = self._slowest.setdefault(role, {})
        size = num_new.bit_length()
        slowest[size] = max(seconds, FADE * slowest.get(size, 0.0))

    def seconds(self, role: str, num_new: int) -> float:
        """The limit for a forward that computes so many tokens.

        A size that was not seen takes at most as long as a larger one, or as its share of tokens of a smaller one.
        """
        if self._given is not None:
            return self._given
        slowest, size = self._slowest.get(role), num_new.bit_length()
        if not slowest:
            expected = self._expected.get(role)
            return UNMEASURED_SECONDS if expected is None else max(FIRST_SECONDS, FACTOR * expected * num_new)
        expected = slowest.get(size) or min(seconds * 2 ** max(0, size - seen) for seen, seconds in slowest.items())
        return max(MIN_SECONDS, FACTOR * expected)
