"""One choice of a response as its text grows, and estimates for other algorithms."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from dsi.core.generation import ACCEPTED, CORRECTED, PLAIN
from dsi.core.sequence import TokenSequence
from dsi.fleets.spans import Span
from dsi.models.names import model_path
from dsi.models.tokenizer import TextOutput, Tokenizer
from dsi.planning.latency import LatencyModel
from dsi.server.choice import ChoiceOutput
from dsi.server.engine_thread import EngineOutput
from dsi.server.estimate import nonsi_seconds, observed_latency, si_seconds


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(model_path("builtin", "target")))


def engine_outputs(tokenizer: Tokenizer, text: str, width: int = 1) -> list[EngineOutput]:
    tokens = tokenizer.encode(text)
    chunks = [tokens[i : i + width] for i in range(0, len(tokens), width)]
    outputs = [EngineOutput(chunk, [PLAIN] * len(chunk)) for chunk in chunks]
    return [*outputs[:-1], replace(outputs[-1], finish_reason="length")]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("text", ["The dog ran to the big red house.", "naïve café 雪 🙂 end"])
def test_choice_deltas_join_to_the_text(tokenizer: Tokenizer, text: str, width: int) -> None:
    choice = ChoiceOutput(0, (1,), TextOutput(tokenizer, (1,), []))
    deltas = [choice.add(output)[0] for output in engine_outputs(tokenizer, text, width)]
    assert "".join(deltas) == choice.text == tokenizer.decode(tokenizer.encode(text))
    assert choice.finish_reason == "length"
    assert choice.offset == sum(len(token.text) for token in choice.tokens)


def test_choice_ends_before_a_stop_string(tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(0, (1,), TextOutput(tokenizer, (1,), ["big r"]))
    for output in engine_outputs(tokenizer, "The dog ran to the big red house."):
        choice.add(output)
        if choice.finish_reason:
            break
    assert choice.text == "The dog ran to the "
    assert choice.finish_reason == "stop"
    assert choice.tokens[-1].text.strip() in "red"


def test_choice_shows_an_incomplete_stop_string_at_the_end(tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(0, (1,), TextOutput(tokenizer, (1,), ["house and garden"]))
    for output in engine_outputs(tokenizer, "The dog saw a house"):
        choice.add(output)
    assert choice.text == "The dog saw a house"
    assert choice.finish_reason == "length"


def test_choice_top_logprobs_include_the_token_itself(tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(0, (1,), TextOutput(tokenizer, (1,), []), num_logprobs=1)
    cat, dog = (tokenizer.encode(f" {word}")[-1] for word in ("cat", "dog"))
    _, tokens = choice.add(EngineOutput([dog], [PLAIN], [((cat, -0.2), (dog, -3.0))]))
    logprobs = choice.completion_logprobs(tokens)
    assert logprobs is not None
    assert (logprobs["token_logprobs"], logprobs["text_offset"]) == ([-3.0], [0])
    assert list(logprobs["top_logprobs"][0].values()) == [-0.2, -3.0]
    chat = choice.chat_logprobs(tokens)
    assert chat is not None
    assert [entry["logprob"] for entry in chat["content"][0]["top_logprobs"]] == [-0.2]


def test_estimate_replays_other_algorithms() -> None:
    latency = LatencyModel(target_ms=10, drafter_ms=1, per_token_ms=0.5)
    assert nonsi_seconds(7, latency) == 0.07
    # A correction ends the first block after two accepted tokens; the second block is accepted whole.
    origins = [ACCEPTED, ACCEPTED, CORRECTED, ACCEPTED, PLAIN, ACCEPTED, PLAIN]
    assert si_seconds(origins, latency, 3) == pytest.approx(2 * (3 * 1 + 10 + 3 * 0.5) / 1000)
    assert si_seconds([], latency, 3) == 0


def test_estimate_scales_latencies_by_the_requests_own_forwards() -> None:
    idle = LatencyModel(target_ms=10, drafter_ms=1, per_token_ms=0.5)
    text = TokenSequence.of((1,))

    def forward(kind: str, width: int, ms: float, stale: bool = False) -> Span:
        return Span("server", kind, kind, 1, text, width, 0, ms / 1000, stale=stale)

    spans = [forward("draft", 1, 2), forward("draft", 1, 3), forward("draft", 1, 4)]
    spans += [forward("verify", 5, 24), forward("verify", 1, 19), forward("verify", 1, 21)]
    latency = observed_latency([*spans, forward("verify", 9, 1, stale=True)], idle)
    assert (latency.target_ms, latency.drafter_ms, latency.per_token_ms) == pytest.approx((20, 3, 1))
    assert observed_latency([], idle) == idle
