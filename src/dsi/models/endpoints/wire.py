"""The wire format of an engine: which requests verify and draft, and how their answers are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.sampling.noise import noise_key

SEED_BITS = 32  # llama.cpp's seeds have no more


@dataclass(frozen=True)
class Call:
    """A request: POST with a body, GET without."""

    path: str
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EndpointInfo:
    """What an endpoint says about its model."""

    kind: str
    model: str  # its name there
    context: int = 0  # tokens; 0: unknown
    vocab_size: int | None = None
    source: str = ""  # the folder or hub name it was loaded from, if known
    eos_token: str | None = None  # as text
    details: tuple[tuple[str, Any], ...] = field(default=(), repr=False)  # which differ between models
    max_new_tokens: int = 0  # of a request; 0: as many as the context has room for

    @property
    def identity(self) -> tuple[object, ...]:
        """What must not change while an engine uses it."""
        return self.kind, self.model, self.context, self.details


class WireFormat(ABC):
    """Builds requests and reads answers. What an answer lacks raises ValueError, KeyError or TypeError."""

    kind: ClassVar[str]
    samples: ClassVar[bool] = False  # whether a position can be sampled with a seed of its own
    keyed_by_position: ClassVar[bool] = False  # whether one seed gives a streamed text and verified positions alike
    has_model_in_answers: ClassVar[bool] = True
    penalties: ClassVar[tuple[str, ...]] = ()  # that a verification can have

    def check_sampling(self, sampling: Sampling, url: str) -> None:
        """Refuse what this engine cannot verify so that every algorithm gives one text."""
        if sampling.needs_draft:
            raise ValueError(f"rule {sampling.rule}: endpoints verify by the rule match alone; leave it out")
        if sampling.logprobs is not None:
            raise ValueError("logprobs: endpoints are not asked for them; leave them out")
        if unsupported := [name for name in sampling.penalties if name not in self.penalties]:
            raise ValueError(f"{unsupported[0]}: {self.kind} at {url} is not asked to apply it; leave it out")
        if sampling.temperature and not self.samples:
            raise ValueError(
                f"temperature {sampling.temperature:g}: {self.kind} at {url} cannot sample each position with a seed "
                "of its own, only greedily; use temperature 0, or a target of kind vllm or dsi"
            )

    def can_stream(self, sampling: Sampling) -> bool:
        """Whether a streamed completion is the text that verifications give."""
        return not sampling.has_penalties and (sampling.temperature == 0 or self.keyed_by_position)

    @abstractmethod
    def verify_calls(
        self, model: str, tokens: Sequence[int], num_positions: int, sampling: Sampling, prompt_length: int
    ) -> list[Call]:
        """The requests, sent at once, for the token after each of the last prefixes of a text."""

    @abstractmethod
    def verified(self, answers: Sequence[Any], num_positions: int) -> Tokens:
        """Read the tokens from the answers to these requests, in order."""

    @abstractmethod
    def stream_call(
        self, model: str, tokens: Sequence[int], count: int, sampling: Sampling, prompt_length: int
    ) -> Call:
        """The request for a streamed continuation; engines whose noise is not ours continue greedily."""

    @abstractmethod
    def streamed(self, chunk: Any, num_received: int) -> Sequence[int]:
        """The tokens that a chunk of the stream adds to those received."""

    @abstractmethod
    def info(self, models: Any, properties: Any) -> EndpointInfo:
        """Read the answers to `/v1/models` and, where there is such a path, to `properties_path`."""

    properties_path: ClassVar[str | None] = None

    def tokenize_call(self, model: str, text: str, add_special_tokens: bool) -> Call:
        return Call("/tokenize", {"model": model, "prompt": text, "add_special_tokens": add_special_tokens})

    def tokenized(self, answer: Any) -> Tokens:
        return check_tokens(answer["tokens"])

    def detokenize_call(self, model: str, tokens: Sequence[int]) -> Call:
        return Call("/detokenize", {"model": model, "tokens": list(tokens)})

    def detokenized(self, answer: Any) -> str:
        return str(answer["prompt"])


def prefixes(tokens: Sequence[int], num_positions: int) -> list[list[int]]:
    """The last prefixes of a text, the shortest first."""
    return [list(tokens[:end]) for end in range(len(tokens) + 1 - num_positions, len(tokens) + 1)]


def position_seed(sampling: Sampling, position: int) -> int:
    """The seed of the token after so many; every request for it has the same, whatever the algorithm."""
    return noise_key(sampling.seed, position) >> (64 - SEED_BITS)


def check_tokens(tokens: Any) -> Tokens:
    """Refuse what is not a list of token ids."""
    if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
        raise ValueError(f"{str(tokens)[:40]!r} is no list of token ids")
    return tuple(tokens)


def only(tokens: Any) -> int:
    """The one token of an answer."""
    [token] = check_tokens(tokens)
    return token


def first_model(models: Any) -> Mapping[str, Any]:
    """The first entry of `/v1/models`, which is the model itself; adapters follow."""
    entry = models["data"][0]
    if not isinstance(entry["id"], str):
        raise ValueError(f"{entry['id']!r} is no name of a model")
    return entry  # type: ignore[no-any-return]


def completion_tokens(chunk: Any) -> list[int]:
    """The tokens in a chunk of a streamed completion that was asked for them."""
    return [token for choice in chunk["choices"] for token in check_tokens(choice["token_ids"] or [])]
