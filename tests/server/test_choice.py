"""One text of an answer as it grows."""

import pytest
from transformers import AutoTokenizer

from dsi.core.generation import ACCEPTED, CORRECTED, PLAIN
from dsi.core.sequence import TokenSequence
from dsi.fleets.spans import Span
from dsi.models.names import model_path
from dsi.models.tokenizer import Tokenizer
from dsi.planning.latency import LatencyModel
from dsi.server.choice import ChoiceOutput
from dsi.server.engine_thread import EngineOutput
from dsi.server.estimate import nonsi_seconds, own_pace, si_seconds


@pytest.fixture(scope="module")
def tongue() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(model_path("builtin", "target")))


def updates(tongue: Tokenizer, text: str, each: int = 1) -> list[EngineOutput]:
    tokens = tongue.encode(text)
    found = [
        EngineOutput(tokens[i : i + each], [PLAIN] * len(tokens[i : i + each])) for i in range(0, len(tokens), each)
    ]
    found[-1].ended = "length"
    return found


@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize("text", ["The dog ran to the big red house.", "naïve café 雪 🙂 end"])
def test_the_pieces_are_the_text(tongue: Tokenizer, text: str, each: int) -> None:
    choice = ChoiceOutput(0, (1,), tongue, [], 0)
    pieces = [choice.take(update)[0] for update in updates(tongue, text, each)]
    assert "".join(pieces) == tongue.decode(tongue.encode(text))
    assert choice.finish_reason == "length"
    assert choice.offset == sum(len(word.spelling) for word in choice.words)


def test_a_stop_ends_it_and_what_follows_is_not_taken(tongue: Tokenizer) -> None:
    choice = ChoiceOutput(0, (1,), tongue, ["big r"], 0)
    for update in updates(tongue, "The dog ran to the big red house."):
        choice.take(update)
        if choice.finish_reason:
            break
    assert "".join(choice.pieces) == "The dog ran to the "
    assert choice.finish_reason == "stop"
    assert choice.words[-1].spelling.strip() in "red"


def test_half_a_stop_is_shown_when_nothing_more_comes(tongue: Tokenizer) -> None:
    choice = ChoiceOutput(0, (1,), tongue, ["house and garden"], 0)
    for update in updates(tongue, "The dog saw a house"):
        choice.take(update)
    assert "".join(choice.pieces) == "The dog saw a house"
    assert choice.finish_reason == "length"


def test_top_logprobs_name_the_token_itself_even_if_it_was_unlikely(tongue: Tokenizer) -> None:
    choice = ChoiceOutput(0, (1,), tongue, [], 0, best=1)
    cat, dog = (tongue.encode(f" {word}")[-1] for word in ("cat", "dog"))
    _, words = choice.take(EngineOutput([dog], [PLAIN], [((cat, -0.2), (dog, -3.0))]))
    told = choice.completion_logprobs(words)
    assert told is not None
    assert (told["token_logprobs"], told["text_offset"]) == ([-3.0], [0])
    assert list(told["top_logprobs"][0].values()) == [-0.2, -3.0]
    chat = choice.chat_logprobs(words)
    assert chat is not None
    assert [entry["logprob"] for entry in chat["content"][0]["top_logprobs"]] == [-0.2]


def test_what_other_algorithms_would_have_taken() -> None:
    pace = LatencyModel(target_ms=10, drafter_ms=1, per_token_ms=0.5)
    assert nonsi_seconds(7, pace) == 0.07
    # Two right and a third wrong end the first block; the second block of three stands, and one more.
    origins = [ACCEPTED, ACCEPTED, CORRECTED, ACCEPTED, PLAIN, ACCEPTED, PLAIN]
    assert si_seconds(origins, pace, 3) == pytest.approx(2 * (3 * 1 + 10 + 3 * 0.5) / 1000)
    assert si_seconds([], pace, 3) == 0


def test_a_requests_own_forwards_tell_its_pace() -> None:
    alone = LatencyModel(target_ms=10, drafter_ms=1, per_token_ms=0.5)
    text = TokenSequence.of((1,))

    def forward(kind: str, width: int, ms: float, stale: bool = False) -> Span:
        return Span("server", kind, kind, 1, text, width, 0, ms / 1000, stale=stale)

    spans = [forward("draft", 1, 2), forward("draft", 1, 3), forward("draft", 1, 4)]
    spans += [forward("verify", 5, 24), forward("verify", 1, 19), forward("verify", 1, 21)]
    found = own_pace([*spans, forward("verify", 9, 1, stale=True)], alone)
    assert (found.target_ms, found.drafter_ms, found.per_token_ms) == pytest.approx((20, 3, 1))
    assert own_pace([], alone) == alone
