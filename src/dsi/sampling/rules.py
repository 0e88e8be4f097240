"""Acceptance rules as pure functions of rows of scores. A rule says what the target's text is."""

from __future__ import annotations

from dsi.core.messages import Sampling
from dsi.sampling.noise import Array
from dsi.sampling.probs import choose


def match(rows: Array, sampling: Sampling, position: int) -> tuple[int, ...]:
    """Seed-coupled exact match (Daliri, Musco and Suresh, 2024): each row's own token.

    The first row is about `position`. A drafter that draws with the same noise is right wherever its
    token is the same, and the text is the target's own whatever the drafter says.
    """
    return tuple(choose(row, sampling, position + i) for i, row in enumerate(rows))
