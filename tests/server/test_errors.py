"""Errors as the official client and those built on it know them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from dsi import Engine
from live_server import Live, Serving

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 512  # of the built-in target
WORD = 5  # a token


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def error(live: Live, path: str, **body: Any) -> dict[str, Any]:
    answer = live.post(path, **body)
    assert answer.status_code == 400, answer.text
    document: dict[str, Any] = answer.json()["error"]
    assert document["type"] == "invalid_request_error"
    return document


@pytest.mark.parametrize(
    ("prompt", "fields", "sentence", "param"),
    [
        ([WORD] * 600, {"max_tokens": 1}, "the prompt has 600 and the request asks for 1 more.", "prompt"),
        ([WORD] * 600, {}, "the prompt has 600 and the request asks for 1 more.", "prompt"),
        ([WORD] * 513, {"max_tokens": 0}, "the prompt has 513.", "prompt"),
        ([WORD] * CONTEXT, {}, "the prompt has 512 and the request asks for 1 more.", "prompt"),
        ([WORD] * 500, {"max_tokens": 13}, "the prompt has 500 and the request asks for 13 more.", "max_tokens"),
        ("a " * 40_000, {}, "the prompt has 80000 characters.", "prompt"),
        (WORD, {"max_tokens": 5000}, "the prompt has 1 and the request asks for 5000 more.", "max_tokens"),
    ],
)
def test_context_overflow_is_refused_as_openai_does(
    live: Live, prompt: Any, fields: dict[str, Any], sentence: str, param: str
) -> None:
    prompt = [prompt] if isinstance(prompt, int) else prompt
    found = error(live, COMPLETIONS, prompt=prompt, **fields)
    assert found["message"] == f"This model's maximum context length is {CONTEXT} tokens, but {sentence}"
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)


def test_context_overflow_of_a_chat_names_its_parameters(live: Live, client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "word " * 600}]
    assert error(live, CHAT, messages=messages)["param"] == "messages"
    short = [{"role": "user", "content": "word"}]
    for name in ("max_tokens", "max_completion_tokens"):
        found = error(live, CHAT, messages=short, **{name: CONTEXT})
        assert (found["code"], found["param"]) == ("context_length_exceeded", name)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
        client.chat.completions.create(model="builtin", messages=messages)
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_left_out_ends_at_the_context(live: Live) -> None:
    done = live.post(COMPLETIONS, prompt=[WORD] * 508, temperature=0, ignore_eos=True).json()
    assert done["usage"] == {"prompt_tokens": 508, "completion_tokens": 4, "total_tokens": CONTEXT}
    assert done["choices"][0]["finish_reason"] == "length"


def test_max_tokens_fills_the_context_exactly(live: Live) -> None:
    done = live.post(COMPLETIONS, prompt=[WORD] * 500, max_tokens=12, temperature=0, ignore_eos=True).json()
    assert done["usage"]["total_tokens"] == CONTEXT


def test_max_tokens_beyond_the_servers_limit_is_refused_on_both_paths(live: Live) -> None:
    sentence = "{} 401: must be at most 400, the limit of this server"
    message = {"role": "user", "content": "a"}
    for name, path, body in (
        ("max_tokens", COMPLETIONS, {"prompt": "a"}),
        ("max_tokens", CHAT, {"messages": [message]}),
        ("max_completion_tokens", CHAT, {"messages": [message]}),
    ):
        found = error(live, path, **body, **{name: 401})
        assert (found["message"], found["param"]) == (sentence.format(name), name)


def test_full_context_is_scored(client: OpenAI) -> None:
    with Engine.load(algorithm="nonsi") as plain:
        prompt = (*plain.tokenizer.encode("Once upon a time"), *[WORD] * (CONTEXT - 5))
        [last] = plain.generate(prompt[:-1], max_new_tokens=1, logprobs=plain.tokenizer.size).top_logprobs
    done = client.completions.create(
        model="builtin", prompt=list(prompt), max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    scores = logprobs.token_logprobs or []
    assert len(scores) == CONTEXT
    assert scores[-1] == pytest.approx(dict(last)[WORD], abs=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 5]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "algorithm": "magic"}, "algorithm"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}, "messages.1.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ],
)
def test_invalid_field_is_a_400_that_names_it(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    found = error(live, path, **body)
    assert found["param"] == param
    assert found["message"].startswith(f"{param}: ")


def test_official_client_raises_a_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: ") as caught:
        client.completions.create(model="builtin", prompt="a", temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_assistant_message_may_have_no_content(live: Live) -> None:
    ask, goes_on = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Go on"}
    contents: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
    texts = [
        live.post(CHAT, messages=[ask, {"role": "assistant", **content}, goes_on], max_tokens=8, temperature=0).json()
        for content in contents
    ]
    assert len({text["choices"][0]["message"]["content"] for text in texts}) == 1


def test_calls_of_tools_in_a_message_need_a_chat_template(live: Live) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    found = error(live, CHAT, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert found["param"] == "messages.0.tool_calls"
    message = "messages.0.tool_calls: needs a chat template, which this model does not have"
    assert (found["code"], found["message"]) == ("unsupported_parameter", message)
    answer = live.post(CHAT, messages=[{"role": "user", "content": "Hello", "name": "Ann"}], max_tokens=1)
    assert answer.status_code == 200


def test_openapi_has_no_status_422(live: Live) -> None:
    document = live.get("/openapi.json").json()
    statuses = {status for path in document["paths"].values() for op in path.values() for status in op["responses"]}
    assert "422" not in statuses
    assert {"400", "424", "429"} <= statuses
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()


def test_passed_deadline_is_not_retried_by_the_official_client(live: Live) -> None:
    before = live.metric('dsi:requests_total{endpoint="completions",outcome="deadline"}')
    with (
        OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.APIStatusError, match=r"the answer was not complete after 0.05 s") as caught,
    ):
        client.completions.create(model="builtin", prompt="Once", max_tokens=400, extra_body={"timeout": 0.05})
    assert (caught.value.status_code, caught.value.code) == (424, "deadline_exceeded")
    assert live.metric('dsi:requests_total{endpoint="completions",outcome="deadline"}') == before + 1


def test_retry_after_lets_refused_requests_of_the_official_client_succeed(serving: Serving) -> None:
    """Three times as many requests as there are places, with the client's two retries."""
    server = serving("--max-running", "2", "--max-waiting", "4")

    async def run() -> list[Any]:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            texts = [
                client.completions.create(model="builtin", prompt="Once", max_tokens=200, temperature=100)
                for _ in range(18)
            ]
            return await asyncio.gather(*texts, return_exceptions=True)

    done = asyncio.run(run())
    refused = [one for one in done if isinstance(one, BaseException)]
    assert {type(one) for one in refused} <= {openai.RateLimitError}
    assert len(refused) <= 3
