"""Choose how the draft tokens of a drafter with another vocabulary are translated to the target's."""

from __future__ import annotations

from dsi.models.protocol import Backend, Model, SamplingModel
from dsi.models.vocab import AUTO, BY_TEXT, BY_TOKEN
from dsi.models.vocab.slem import SLEM
from dsi.models.vocab.tli import TLI
from dsi.models.vocab.vocabulary import Vocabulary

# The fraction of a sample text's tokens that the drafter must share for `auto` to choose TLI. TLI never drafts
# tokens that are not shared; SLEM can draft all, but a token costs more (0.9 against 0.6 ms for the built-in
# drafter, which 5% more acceptance makes up for in virtual time). In `benchmarks/vocabularies.py` acceptance is
# equal at a fraction of 0.81 (0.433 and 0.438), and TLI's is 9% lower at 0.68.
MIN_SHARED_RATE = 0.75
SAMPLE_TEXT = """\
Once upon a time there was an old man who lived by the sea. Every morning he went down to the shore, and
nobody knew what he was looking for. "It isn't the fish," he said; "I've had enough of those since 1987."

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

The model was trained on 300,000 examples, which took about 12 hours, and evaluated on questions about
history, geography and physics. However, the results are not significantly better than those reported.
"""


def translate_drafter(
    vocab: str, backend: Backend, drafter: Vocabulary, target: Vocabulary, context: int, name: str
) -> Model:
    """Wrap a backend as a drafter that drafts the target's tokens; `name` is for errors."""
    by_token = TLI(backend, drafter, target, context)
    if vocab == AUTO:
        vocab = BY_TOKEN if shared_token_rate(by_token, target) >= MIN_SHARED_RATE else BY_TEXT
    if vocab == BY_TEXT:
        return SLEM(backend, drafter, target, context)
    if not len(by_token.shared):
        raise ValueError(
            f"vocab {vocab!r}: the drafter {name} shares none of its {drafter.size} tokens with the "
            f"target's {target.size}; take {BY_TEXT}, which goes by text"
        )
    return SamplingModel(by_token)


def shared_token_rate(by_token: TLI, target: Vocabulary) -> float:
    """Return the fraction of a sample text's tokens that the two vocabularies share."""
    tokens, shared = target.encode(SAMPLE_TEXT), set(by_token.shared.target.tolist())
    return sum(token in shared for token in tokens) / max(1, len(tokens))
