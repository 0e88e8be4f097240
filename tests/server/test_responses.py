"""The events of a stream, most of which differ in their text alone."""

import json
from typing import Any, cast

import pytest

from dsi.models.tokenizer import TextOutput, Tokenizer
from dsi.server.choice import ChoiceOutput, TokenText
from dsi.server.engine_thread import EngineOutput
from dsi.server.responses import TEXT_MARK, Chunks
from dsi.server.service import ApiRequest, Delta, EngineInfo
from sample_tokenizers import sample_tokenizer

TEXTS = (' a "quoted" \\ text', "\n\tédition 🦊 \u2028", TEXT_MARK, '"', "plain")


def api_request(chat: bool, usage: bool) -> ApiRequest:
    tokenizer = Tokenizer(sample_tokenizer("byte_level"))
    choices = [ChoiceOutput(index, (1,), TextOutput(tokenizer, (1,))) for index in range(2)]
    fields: dict[str, Any] = dict.fromkeys(("echo", "trace", "token_ids"), False)
    names: dict[str, Any] = {
        "id": "id-1",
        "client": 0,
        "model": 'a "model"',
        "algorithm": "dsi",
        "lookahead": 5,
        "rule": "match",
    }
    return ApiRequest(**names, **fields, chat=chat, usage=usage, choices=choices, seconds=1.0, stream=True, created=7)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_chunks_of_text_are_the_documents_of_the_api(chat: bool, usage: bool) -> None:
    request = api_request(chat, usage)
    chunks = Chunks(cast("EngineInfo", None), request)  # which only the last event of a choice needs
    kind = "chat.completion.chunk" if chat else "text_completion"
    envelope = {"id": "id-1", "object": kind, "created": 7, "model": 'a "model"'}
    for text in TEXTS:
        for choice in request.choices:
            [event] = chunks.of(Delta(choice, text, [TokenText(3, text, 0)], EngineOutput((3,))))
            assert (event[:6], event[-2:]) == (b"data: ", b"\n\n")
            content = {"delta": {"content": text}} if chat else {"text": text}
            written = {"index": choice.index, **content, "logprobs": None, "finish_reason": None}
            expected = {**envelope, "choices": [written], **({"usage": None} if usage else {})}
            assert json.loads(event[6:]) == expected
