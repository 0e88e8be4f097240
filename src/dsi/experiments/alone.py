"""One model writing by itself: what speculation is measured against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from dsi.core.messages import GREEDY, Sampling
from dsi.core.sequence import Tokens
from dsi.models.protocol import ForwardRequest, Model

Fresh = Callable[[], Model]  # the model, with nothing read yet


def write(
    model: Model, prompt: Tokens, tokens: int, ends: Collection[int] = (), sampling: Sampling = GREEDY
) -> Iterator[int]:
    """One forward for each token, up to so many or to an end token, which is the last."""
    text = list(prompt)
    for _ in range(tokens):
        [token] = model.answer(ForwardRequest(text, len(text), sampling=sampling))
        yield token
        if token in ends:
            return
        text.append(token)
