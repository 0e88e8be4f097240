"""Verifying a text that is given: the same tokens as generating it, and nothing computed twice."""

from collections.abc import Iterator
from random import Random

import pytest

from dsi.core.messages import TARGET, Sampling
from dsi.core.request import VerifyRequest
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.core.text_table import TextTable
from dsi.engine.deployment import ContextLengthError
from dsi.engine.engine import Engine
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.threads import ThreadFleet
from dsi.models.hf import Transformer, load_model
from dsi.models.kv_sequence import KVSequence
from dsi.models.names import BUILTIN, model_path
from dsi.models.protocol import SamplingModel

pytestmark = pytest.mark.slow

STORY = "Once upon a time"
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repetition_penalty=1.3, frequency_penalty=0.5)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(spec=SpecConfig("nonsi")) as engine:
        yield engine


def generate(engine: Engine, sampling: Sampling, tokens: int) -> tuple[Tokens, Tokens]:
    prompt = engine.tokenizer.encode(STORY)
    [done] = engine.loop.run(engine.make_request(prompt, tokens, engine.spec, sampling))
    return prompt, done.tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_verify_request_gives_the_tokens_that_generating_gives(engine: Engine, sampling: Sampling) -> None:
    prompt, tokens = generate(engine, sampling, 60)
    text, random = (*prompt, *tokens), Random(1)
    for _ in range(40):
        end = random.randrange(len(prompt), len(text))
        num_positions = random.randrange(1, end - len(prompt) + 2)
        request = engine.verify_request(text[:end], num_positions, sampling, len(prompt))
        assert engine.loop.run(request)[0].tokens == text[end - num_positions + 1 : end + 1]


def test_verify_request_answers_after_draft_tokens_that_are_wrong(engine: Engine) -> None:
    prompt, tokens = generate(engine, Sampling(), 12)
    wrong = (*prompt, *tokens[:5], tokens[5] + 1, *tokens[6:])
    [done] = engine.loop.run(engine.verify_request(wrong, 13, Sampling()))
    assert done.tokens[:6] == tokens[:6]
    assert len(done.tokens) == 13


def test_verify_requests_share_forwards_with_other_requests(engine: Engine) -> None:
    prompt, tokens = generate(engine, SAMPLINGS[1], 40)
    text = (*prompt, *tokens)
    others = [engine.make_request(prompt, 40, engine.spec, SAMPLINGS[1]) for _ in range(3)]
    blocks = [engine.verify_request(text[: end + 4], 4, SAMPLINGS[1], len(prompt)) for end in range(5, 40, 4)]
    *texts, first = (done.tokens for done in engine.loop.run(*others, *blocks))
    assert texts[:3] == [tokens] * 3
    assert [*texts[3:], first] == [text[end + 1 : end + 5] for end in range(5, 40, 4)]


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        ((), (1,), "an empty prompt"),
        ((1, 2), (3,), "num_positions 3: must be at least 1 and at most 2"),
        ((1, 2), (0,), "num_positions 0"),
        ((1, 2), (1, 3), "prompt_length 3: must be at least 1 and at most 2"),
        ((1, 1 << 30), (1,), "token 1073741824"),
    ],
)
def test_verify_request_refuses_what_cannot_be_verified(
    engine: Engine, prompt: Tokens, options: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        engine.verify_request(prompt, options[0], Sampling(), *options[1:])


def test_verify_request_has_the_whole_context(engine: Engine) -> None:
    context = engine.deployment.context
    [done] = engine.loop.run(engine.verify_request((1,) * context, 1, Sampling()))
    assert len(done.tokens) == 1
    with pytest.raises(ContextLengthError):
        engine.verify_request((1,) * (context + 1), 1, Sampling())


def test_verify_request_bounds_what_grows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsi.engine.engine.MAX_GROWTH", 16)
    prompt, tokens = generate(engine, Sampling(), 60)
    text = (*prompt, *tokens)
    for end in range(len(prompt), len(text)):
        request = engine.verify_request(text[:end], 1, Sampling(), len(prompt))
        assert end - len(request.context.origin) < 16
        assert engine.loop.run(request)[0].tokens == text[end : end + 1]
    with pytest.raises(ValueError, match=f"prompt_length {len(prompt)}: with penalties"):
        engine.verify_request(text, 1, Sampling(presence_penalty=0.5), len(prompt))


class CountingTransformer(Transformer):
    """Counts the tokens that it computes."""

    computed = 0

    def _compute(self, sequence: KVSequence, new_tokens: list[int], num_positions: int) -> object:
        self.computed += len(new_tokens)
        return super()._compute(sequence, new_tokens, num_positions)


def test_verify_requests_of_a_growing_text_compute_only_what_is_new() -> None:
    backend = CountingTransformer(load_model(model_path(BUILTIN, TARGET)))
    fleet, table = ThreadFleet([Server("target-1", TARGET, SamplingModel(backend))]), TextTable()
    loop, prompt = EngineLoop(fleet), tuple(range(20, 60))

    def computed(tokens: Tokens, num_positions: int) -> int:
        before = backend.computed
        loop.run(VerifyRequest(table.sequence(tokens, len(prompt)), num_positions))
        return backend.computed - before

    try:
        assert computed(prompt, 1) == 40
        assert computed((*prompt, 1, 2, 3), 3) == 3
        assert computed((*prompt, 1, 2, 3, 4, 5), 2) == 2
        assert computed((*prompt, 1, 2, 9, 8), 2) == 2  # the third was rejected
        assert computed((*prompt, 1, 2, 9, 8), 2) == 2  # logits are not kept
        assert computed((*prompt, 1, 2, 9, 8, 7), 1) == 1
        [prefix] = fleet._servers["target-1"].prefixes.entries.values()
        assert (prefix.num_cached, len(prefix.tokens)) == (45, 45)
    finally:
        fleet.close()
