"""Prompts to measure acceptance with: the built-in ones, and a random sample that fits the models' context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from dsi.core.sequence import Tokens
from dsi.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptSample:
    prompts: list[Tokens]
    skipped: int  # because they were too long


def sample_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, seed: int, tokens: int, context: int
) -> PromptSample:
    """Sample prompts uniformly; one that leaves no room for `tokens` new tokens is skipped, never cut."""
    prompts: list[Tokens] = []
    skipped = 0
    for text in Random(seed).sample(texts, len(texts)):
        if len(prompts) == count:
            break
        encoded = tokenizer.encode(text)
        if context and len(encoded) + tokens > context:
            skipped += 1
        else:
            prompts.append(encoded)
    if not prompts:
        raise ValueError(
            f"none of {skipped} prompts leaves room for {tokens} tokens in the models' context of {context}"
        )
    return PromptSample(prompts, skipped)


BUILTIN_PROMPTS = """
The little boat was
Anna opened the blue box and
One morning, a bear
The baker forgot the bread, so
Under the bridge lived a
Sam could not find his shoes
A kind old man gave
The cat looked at the moon and
On her birthday, Zoe
The two brothers wanted to build
It was a cold night, and the
"Where is my hat?" asked
A small frog jumped into
When the bell rang, all the
Mum said that the soup
Peter had never seen the sea
The red bird sang a song
Every day after school, Emma
There was a big hole in the
The farmer had ten sheep but
Leo and his sister went to
A funny clown came to the
The wind took the kite
Nina was proud of her new
At the top of the hill stood
The mouse was hungry and
Grandpa told them a secret
The puppy did not want to
Once there was a princess who
Max found a shiny stone
The rain stopped and a rainbow
A tall tree grew in the
Ella shared her apple with
The doctor was very kind
In the garden, a snail
Tim's truck was broken, and
A lonely star wanted
The children heard a loud noise
Rosa was good at drawing
The fox and the rabbit
On the farm, the little pig
Jane saw a spider in the
The ice cream began to melt
"Let us play a game," said
A boy named Oliver had
The library was quiet until
Far away, on an island,
The duck lost one of her
Ben and Mia made a plan
The night before the trip, Kim
""".strip().splitlines()
