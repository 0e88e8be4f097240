"""Each parameter of a request is honoured, or refused by its name."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import CompletionChoice

from dsi import Engine
from dsi.server.errors import ApiError
from dsi.server.parameters import UNSUPPORTED, WITHOUT_EFFECT, check_unknown
from dsi.server.schema import ChatBody, CompletionBody
from live_server import Live

STORY = "Once upon a time"
CHAT: Any = [{"role": "user", "content": STORY}]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine.load(algorithm="nonsi") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: OpenAI, prompt: Any = STORY, max_tokens: int = 40, **fields: Any) -> CompletionChoice:
    """With the fields of OpenAI's API, and others in `extra_body`, as a user of the client writes them."""
    done = client.completions.create(
        model="builtin", prompt=prompt, max_tokens=max_tokens, temperature=0, seed=1, extra_body=fields
    )
    return done.choices[0]


# Honoured: as the engine's own, which tests/engine/test_penalties.py compares with transformers.


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"logit_bias": {"13": 3.0, "357": -50}},
        {"bad_words": ["Lily", "girl"]},
        {"allowed_token_ids": list(range(10, 300))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_parameter_changes_the_text_as_in_the_engine(client: OpenAI, plain: Engine, fields: dict[str, Any]) -> None:
    bias = fields.get("logit_bias")
    own = fields if bias is None else {"logit_bias": {int(token): value for token, value in bias.items()}}
    expected = plain.generate(STORY, max_new_tokens=40, **own)
    assert complete(client, **fields).text == expected.text
    assert expected.text != plain.generate(STORY, max_new_tokens=40).text
    done = client.chat.completions.create(
        model="builtin", messages=CHAT, max_tokens=40, temperature=0, extra_body=fields
    )
    prompt = plain.tokenizer.apply_chat_template(CHAT)
    assert done.choices[0].message.content == plain.generate(prompt, max_new_tokens=40, **own).text


def test_official_arguments_of_the_client_are_honoured(client: OpenAI, plain: Engine) -> None:
    penalties: Any = {"presence_penalty": 0.8, "frequency_penalty": 0.4}
    done = client.completions.create(
        model="builtin", prompt=STORY, max_tokens=30, temperature=0.7, seed=3, logit_bias={"13": -100}, **penalties
    )
    options: dict[str, Any] = {"temperature": 0.7, "seed": 3, "logit_bias": {13: -100.0}, **penalties}
    assert done.choices[0].text == plain.generate(STORY, max_new_tokens=30, **options).text


def test_logprobs_stay_the_models_own(client: OpenAI) -> None:
    def first(**fields: Any) -> Any:
        logprobs = complete(client, max_tokens=1, logprobs=5, **fields).logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        return logprobs.top_logprobs[0]

    biased, plain = first(logit_bias={"5": 100}), first()
    assert {token: biased[token] for token in plain} == pytest.approx(plain, abs=1e-4)


def test_ignore_eos_goes_on_after_the_end(client: OpenAI) -> None:
    ended = complete(client, max_tokens=300)
    assert ended.finish_reason == "stop"
    going_on = complete(client, max_tokens=300, ignore_eos=True)
    assert going_on.finish_reason == "length"
    assert going_on.text.startswith(ended.text)
    assert len(going_on.text) > len(ended.text)


def test_min_tokens_delays_the_end(client: OpenAI, plain: Engine) -> None:
    [ended] = plain.tokenizer.eos_token_ids
    done = complete(client, logit_bias={ended: 100}, max_tokens=20, min_tokens=7, logprobs=0)
    assert done.finish_reason == "stop"
    assert done.logprobs is not None
    assert len(done.logprobs.tokens or []) == 8


def test_stop_token_ids_end_the_text(client: OpenAI, plain: Engine) -> None:
    expected = plain.generate(STORY, max_new_tokens=40)
    end = expected.tokens[12]
    before = expected.tokens[: expected.tokens.index(end)]
    done = complete(client, stop_token_ids=[end])
    assert done.finish_reason == "stop"
    assert done.text == plain.tokenizer.decode((*expected.prompt, *before))[len(STORY) :]
    included = complete(client, stop_token_ids=[end], include_stop_str_in_output=True)
    assert included.text == plain.tokenizer.decode((*expected.prompt, *before, end))[len(STORY) :]


def test_include_stop_str_in_output_keeps_the_stop_string(client: OpenAI) -> None:
    before = complete(client, stop=["girl"])
    included = complete(client, stop=["girl"], include_stop_str_in_output=True)
    assert included.text == before.text + "girl"
    assert included.finish_reason == before.finish_reason == "stop"


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_all_tokens(live: Live, top_k: int) -> None:
    body = {"prompt": STORY, "max_tokens": 20, "seed": 8}
    texts = [live.post("/v1/completions", **body, **fields).json() for fields in ({}, {"top_k": top_k})]
    assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]


def test_add_special_tokens_changes_the_prompt(live: Live, plain: Engine) -> None:
    tokenizer = plain.tokenizer.tokenizer
    for value in (True, False):
        expected = len(tokenizer(STORY, add_special_tokens=value)["input_ids"])
        for path, body in (("completions", {"prompt": STORY}), ("chat/completions", {"messages": CHAT})):
            done = live.post(f"/v1/{path}", **body, max_tokens=1, add_special_tokens=value).json()
            assert done["usage"]["prompt_tokens"] == expected
    assert len(tokenizer(STORY)["input_ids"]) > len(tokenizer(STORY, add_special_tokens=False)["input_ids"])


def test_parameters_together_give_one_text_under_every_algorithm(live: Live) -> None:
    together = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "bad_words": ["Lily"], "min_tokens": 20}
    body = {"prompt": STORY, "max_tokens": 30, "temperature": 0.8, "seed": 5, "logit_bias": {"17": 1.5}, **together}
    texts = {
        live.post("/v1/completions", **body, algorithm=algorithm).json()["choices"][0]["text"]
        for algorithm in ("nonsi", "si", "pearl", "dsi", "auto")
    }
    assert len(texts) == 1


# Refused.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"allowed_token_ids": [4096]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": ["a" * 20_000]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"min_tokens": 41}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"lookahead": 4, "algorithm": "auto"}, "lookahead"),
        ({"best_of": 3}, "best_of"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_parameter_out_of_bounds_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=param) as caught:
        complete(client, **fields)
    assert caught.value.param == param


REFUSED: dict[str, Any] = dict.fromkeys(UNSUPPORTED, True) | {
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "length_penalty": 0.8,
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "a"},
    "prompt_logprobs": 1,
    "add_generation_prompt": False,
    "skip_special_tokens": False,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "guided_json": {},
    "guided_regex": "a*",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "guided_decoding_backend": "xgrammar",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_parameter_is_refused_by_name(live: Live, name: str) -> None:
    bodies = {"chat/completions": {"messages": CHAT}, "completions": {"prompt": STORY}}
    for path, body in bodies.items():
        if name == "echo" and path == "completions":
            continue
        answer = live.post(f"/v1/{path}", **body, max_tokens=1, **{name: REFUSED[name]})
        assert answer.status_code == 400, name
        assert answer.json()["error"] == {
            "message": f"{name}: is not supported here",
            "type": "invalid_request_error",
            "param": name,
            "code": "unsupported_parameter",
        }


def test_json_schema_is_refused_through_the_official_client(client: OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="response_format: is not supported here"):
        client.chat.completions.create(model="builtin", messages=CHAT, response_format=schema)


def test_misspelt_parameter_is_refused_by_name(live: Live) -> None:
    error = live.post("/v1/completions", prompt=STORY, temprature=0).json()["error"]
    assert (error["message"], error["param"]) == ("temprature: is no parameter here", "temprature")
    assert error["code"] == "unknown_parameter"


def test_fields_without_effect_are_accepted(live: Live) -> None:
    neutral = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    ignored = dict.fromkeys(WITHOUT_EFFECT, "x") | {"metadata": {"a": "b"}, "store": True, "unknown": None}
    body = {"messages": CHAT, "max_tokens": 2, "stream_options": None, **neutral, **ignored}
    assert live.post("/v1/chat/completions", **body).status_code == 200


@pytest.mark.parametrize("name", [name for name, values in UNSUPPORTED.items() if values])
def test_unsupported_parameter_is_accepted_at_its_neutral_values(name: str) -> None:
    for value in UNSUPPORTED[name]:
        check_unknown({name: value})
    check_unknown({name: None})
    with pytest.raises(ApiError, match=f"{name}: is not supported here"):
        check_unknown({name: "other"})


def test_no_parameter_is_both_supported_and_refused() -> None:
    supported = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    assert supported & UNSUPPORTED.keys() == {"echo"}
    assert not supported & WITHOUT_EFFECT
    assert not UNSUPPORTED.keys() & WITHOUT_EFFECT
