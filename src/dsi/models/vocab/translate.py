"""A drafter whose vocabulary may be another than the target's: which way its guesses are translated."""

from __future__ import annotations

from dsi.models.protocol import Backend, Model, SamplingModel
from dsi.models.vocab import AUTO, BY_TEXT, BY_TOKEN
from dsi.models.vocab.slem import SLEM
from dsi.models.vocab.tli import TLI
from dsi.models.vocab.vocabulary import Vocabulary

# Of an ordinary text's tokens, the share that the drafter must have for `auto` to go by tokens. What it lacks
# it never guesses; through text it can guess all, but a guess costs more (0.9 against 0.6 ms for the built-in
# drafter, which 5% more right guesses make up for in virtual time). In `benchmarks/vocabularies.py` the two
# are right equally often at 0.81 (0.433 and 0.438 of the guesses), and by tokens it is 9% less at 0.68.
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
    """A drafter that guesses in the target's tokens; `name` is what an error calls it."""
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
    """Of an ordinary text's tokens, those that this drafter could guess."""
    tokens, known = target.encode(SAMPLE_TEXT), set(by_token.shared.target.tolist())
    return sum(token in known for token in tokens) / max(1, len(tokens))
