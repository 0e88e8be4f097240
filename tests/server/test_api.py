"""The API of a running server, with the official client and without."""

import json
import os
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from attackers import num_requests, until
from dsi import Engine
from live_server import Live

pytestmark = pytest.mark.slow

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """The same pair without a server, for plain decoding."""
    with Engine.load(algorithm="nonsi") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("algorithm", ["dsi", "si", "pearl", "nonsi", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_completion_is_the_text_of_plain_decoding(
    client: OpenAI, plain: Engine, algorithm: str, temperature: float
) -> None:
    done = client.completions.create(
        model="builtin",
        prompt=STORY,
        max_tokens=40,
        temperature=temperature,
        seed=5,
        extra_body={"algorithm": algorithm},
    )
    expected = plain.generate(STORY, max_new_tokens=40, temperature=temperature, seed=5)
    assert done.choices[0].text == expected.text
    assert done.choices[0].finish_reason == expected.finish_reason
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, len(expected.tokens))


def test_completion_stream_joins_to_the_text_and_ends_with_usage(client: OpenAI, plain: Engine) -> None:
    with client.completions.create(
        model="builtin",
        prompt=STORY,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == plain.generate(STORY, max_new_tokens=60).text
    assert len(pieces) > 2
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60


def test_chat_stream_joins_to_the_whole_answer(client: OpenAI, plain: Engine) -> None:
    messages = [{"role": "user", "content": "Tell me of a fox."}]
    done = client.chat.completions.create(
        model="builtin",
        messages=messages,  # type: ignore[arg-type]
        max_completion_tokens=30,
        temperature=0,
    )
    stream = client.chat.completions.create(
        model="builtin",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=30,
        temperature=0,
        stream=True,
    )
    deltas = [chunk.choices[0].delta for chunk in stream]  # type: ignore[union-attr]
    expected = plain.generate(plain.tokenizer.apply_chat_template(messages), max_new_tokens=30)
    assert done.choices[0].message.content == expected.text
    assert done.choices[0].message.role == "assistant"
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text


def test_completion_orders_choices_and_gives_each_its_seed(client: OpenAI, plain: Engine) -> None:
    prompts = [STORY, "The little dog"]
    done = client.completions.create(model="builtin", prompt=prompts, n=2, max_tokens=12, temperature=1.0, seed=3)
    expected = [
        plain.generate(prompt, max_new_tokens=12, temperature=1.0, seed=seed).text
        for prompt in prompts
        for seed in (3, 4)
    ]
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert len(set(expected)) == 4


def test_completion_accepts_token_ids(client: OpenAI, plain: Engine) -> None:
    tokens = list(plain.tokenizer.encode(STORY))
    texts = [
        client.completions.create(model="builtin", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in (STORY, tokens, [tokens])
    ]
    assert len(set(texts)) == 1


def test_completion_returns_token_ids(live: Live, plain: Engine) -> None:
    expected = plain.generate(STORY, max_new_tokens=12)
    body = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "echo": True}
    [choice] = live.post("/v1/completions", **body).json()["choices"]
    assert tuple(choice["token_ids"]) == expected.tokens
    assert tuple(choice["prompt_token_ids"]) == expected.prompt
    lines = live.post("/v1/completions", **body, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == list(expected.tokens)


def test_completion_ends_before_a_stop_string(client: OpenAI, plain: Engine) -> None:
    done = client.completions.create(
        model="builtin", prompt=STORY, max_tokens=60, temperature=0, stop=["loved", "never said"]
    )
    [choice] = done.choices
    assert choice.finish_reason == "stop"
    assert choice.text == plain.generate(STORY, max_new_tokens=60).text.partition("loved")[0]


def test_completion_logprobs_are_the_targets(client: OpenAI, plain: Engine) -> None:
    done = client.completions.create(model="builtin", prompt=STORY, max_tokens=10, temperature=0, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    expected = plain.generate(STORY, max_new_tokens=10, logprobs=2)
    assert logprobs.token_logprobs == pytest.approx([top[0][1] for top in expected.top_logprobs], abs=1e-4)
    assert "".join(logprobs.tokens or []) == done.choices[0].text
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 and max(top.values()) <= 0 for top in logprobs.top_logprobs)
    offsets = logprobs.text_offset or []
    assert [done.choices[0].text[at:].startswith(token) for at, token in zip(offsets, logprobs.tokens or [])] == [
        True
    ] * 10


def test_chat_logprobs_name_each_token_and_its_alternatives(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model="builtin",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert bytes(entry.bytes or []).decode() == entry.token


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI, plain: Engine) -> None:
    done = client.completions.create(model="builtin", prompt=STORY, max_tokens=0, echo=True, logprobs=1, temperature=0)
    [choice] = done.choices
    assert choice.text == STORY
    assert choice.logprobs is not None
    tokens = plain.tokenizer.encode(STORY)
    expected = [None]
    for i in range(1, len(tokens)):
        done_one = plain.generate(tokens[:i], max_new_tokens=1, logprobs=plain.tokenizer.size)
        expected.append(dict(done_one.top_logprobs[0])[tokens[i]])  # type: ignore[arg-type]
    logprobs = list(choice.logprobs.token_logprobs or [])
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)


def test_echo_continues_the_prompt(client: OpenAI, plain: Engine) -> None:
    done = client.completions.create(model="builtin", prompt=STORY, max_tokens=5, echo=True, logprobs=0, temperature=0)
    [choice] = done.choices
    assert choice.text == STORY + plain.generate(STORY, max_new_tokens=5).text
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 5 + len(plain.tokenizer.encode(STORY))
    assert done.usage is not None
    assert done.usage.completion_tokens == 5


def test_response_metrics_describe_speculation(live: Live) -> None:
    done = live.post("/v1/completions", prompt=STORY, max_tokens=40, temperature=0, lookahead=4).json()
    speculation = done["metrics"]["speculative_decoding"]
    assert (speculation["algorithm"], speculation["lookahead"], speculation["rule"]) == ("dsi", 4, "match")
    assert 0 < speculation["num_accepted_draft_tokens"] <= speculation["num_draft_tokens"]
    rate = speculation["num_accepted_draft_tokens"] / speculation["num_draft_tokens"]
    assert speculation["draft_acceptance_rate"] == rate
    length = 1 + speculation["num_accepted_draft_tokens"] / speculation["num_drafts"]
    assert speculation["mean_acceptance_length"] == length
    alone = live.post("/v1/completions", prompt=STORY, max_tokens=8, temperature=0, algorithm="nonsi").json()
    assert alone["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert alone["metrics"]["speculative_decoding"]["target_forwards"] == 8


@pytest.mark.parametrize("rule", ["reject", "block", "specinfer"])
def test_completion_is_reproducible_under_other_rules(live: Live, rule: str) -> None:
    body = {"prompt": STORY, "max_tokens": 16, "temperature": 1.0, "seed": 1, "rule": rule, "algorithm": "si"}
    texts = {live.post("/v1/completions", **body).json()["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1


def test_trace_has_every_token_and_server(live: Live) -> None:
    body = {"prompt": STORY, "max_tokens": 30, "temperature": 0, "stream": True, "trace": True}
    response = live.post("/v1/completions", **body)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    tokens = [token for chunk in chunks for token in chunk["trace"]["tokens"]]
    assert len(tokens) == 30
    assert {token["how"] for token in tokens} <= {"accepted", "corrected", "plain"}
    assert sum(token["how"] == "accepted" for token in tokens) > 5
    assert all(len(token["alternatives"]) >= 3 for token in tokens)
    spans = [span for chunk in chunks for span in chunk["trace"]["spans"]]
    assert {span["kind"] for span in spans} >= {"draft", "verify"}
    assert all(0 <= span["start"] <= span["end"] for span in spans)
    assert {server["name"] for server in chunks[0]["trace"]["servers"]} == {"drafter", "target-1", "target-2"}
    assert chunks[-1]["trace"]["root"] == 30
    trace = live.get(f"/v1/traces/{chunks[0]['id']}").json()
    instants = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert sum("cat" not in event for event in instants) == 30
    wrong = sum(token["how"] == "corrected" for token in tokens)
    assert sum(event.get("cat") == "rejection" for event in instants) == wrong


def test_response_metrics_describe_overlap(live: Live) -> None:
    body = {"prompt": STORY, "max_tokens": 30, "temperature": 0}
    done = live.post("/v1/completions", **body, algorithm="dsi").json()
    began = time.perf_counter()
    alone = live.post("/v1/completions", **body, algorithm="nonsi").json()
    took_ms = 1000 * (time.perf_counter() - began)
    overlap, plain = done["metrics"]["overlap"], alone["metrics"]["overlap"]
    assert (plain["hidden_share"], plain["rejections"], plain["drafter_ms"]) == (0, 0, None)
    assert plain["ideal_ms"] == pytest.approx(30 * plain["target_ms"])  # a forward for each token
    assert 1 <= plain["time_over_ideal"] <= took_ms / plain["ideal_ms"]
    assert overlap["hidden_share"] > 0
    assert overlap["idle_share"].keys() == {"drafter", "target-1", "target-2"}
    assert overlap["drafter_ms"] < overlap["target_ms"]
    assert overlap["wasted_drafts"] == done["metrics"]["speculative_decoding"]["num_wasted_draft_tokens"]
    [head] = [
        event for event in live.get(f"/v1/traces/{done['id']}").json()["traceEvents"] if event["name"] == "process_name"
    ]
    assert 0 <= head["args"]["overlap"].pop("hidden_time_share") < 1
    assert head["args"]["overlap"] == overlap


def test_response_metrics_omit_idle_time_of_shared_servers(live: Live) -> None:
    done = live.post("/v1/completions", prompt=STORY, n=2, max_tokens=20, temperature=0).json()
    assert done["metrics"]["overlap"]["idle_share"] is None
    assert done["metrics"]["overlap"]["target_ms"] > 0


def test_auto_reports_decisions_in_stream_trace_and_metrics(live: Live) -> None:
    before = live.metric("dsi:decisions_total")
    body = {"prompt": "def f(n):", "max_tokens": 40, "temperature": 0, "stream": True, "trace": True}
    lines = live.post("/v1/completions", **body, algorithm="auto").text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    decisions = [decision for chunk in chunks for decision in chunk["trace"].get("decisions", ())]
    assert decisions[0]["cause"] == "start"
    assert chunks[-1]["metrics"]["overlap"]["decisions"] == decisions
    assert chunks[-1]["metrics"]["speculative_decoding"]["lookahead"] is None
    events = live.get(f"/v1/traces/{chunks[0]['id']}").json()["traceEvents"]
    marks = [event for event in events if event.get("cat") == "decision"]
    assert [event["name"] for event in marks] == [decision["way"] for decision in decisions]
    assert [event["ts"] for event in marks] == pytest.approx([decision["at"] * 1e6 for decision in decisions])
    assert live.metric("dsi:decisions_total") == before + len(decisions)


def test_completion_of_64_prompts_is_served_by_a_queue_of_8(live: Live) -> None:
    prompts = [f"{STORY} {i}" for i in range(64)]
    done = live.post("/v1/completions", prompt=prompts, max_tokens=2, temperature=0).json()
    assert [choice["index"] for choice in done["choices"]] == list(range(64))
    assert done["usage"]["completion_tokens"] == 128
    [alone] = live.post("/v1/completions", prompt=prompts[63], max_tokens=2, temperature=0).json()["choices"]
    assert done["choices"][63]["text"] == alone["text"]


def test_auto_refuses_a_lookahead(live: Live) -> None:
    answer = live.post("/v1/completions", prompt="a", algorithm="auto", lookahead=4)
    assert answer.status_code == 400
    sentence = "lookahead 4 with the algorithm auto: it finds its own; leave one of them out"
    assert answer.json()["error"]["message"] == sentence


def test_metrics_count_tokens_and_speculation(live: Live) -> None:
    names = (
        "dsi:generation_tokens_total",
        "dsi:prompt_tokens_total",
        "dsi:spec_decode_num_draft_tokens_total",
    )
    before = [live.metric(name) for name in names]
    done = live.post("/v1/completions", prompt=STORY, max_tokens=20, temperature=0).json()
    generated, prompts, drafted = (live.metric(name) - was for name, was in zip(names, before))
    assert (generated, prompts) == (20, 5)
    assert drafted == done["metrics"]["speculative_decoding"]["num_draft_tokens"]
    text = live.get("/metrics").text
    for name in (
        "dsi:spec_decode_num_drafts_total",
        "dsi:spec_decode_num_accepted_tokens_total",
        'dsi:spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
        "dsi:time_to_first_token_seconds_bucket",
        "dsi:inter_token_latency_seconds_bucket",
        "dsi:e2e_request_latency_seconds_bucket",
        "dsi:num_requests_running",
        "dsi:num_requests_waiting",
        'dsi:target_forwards_total{hidden="true"}',
        "dsi:stale_tasks_total",
        "dsi:wasted_draft_tokens_total",
        "dsi:drafter_lead_tokens_bucket",
        'dsi:server_busy_seconds_total{role="target",server="target-1"}',
    ):
        assert name in text


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"model": "other", "prompt": "a"}),
        (400, {"prompt": "a", "max_tokens": 401}),
        (400, {"prompt": "a", "n": 65}),
        (400, {"prompt": [1 << 20]}),
        (400, {"prompt": "word " * 2000}),
        (400, {"prompt": "a", "presence_penalty": 2.5}),
        (400, {"prompt": "a", "stop": ["x"] * 17}),
        (400, {}),
        (400, {"prompt": "a", "temperature": -1}),
        (400, {"prompt": "a", "algorithm": "magic"}),
    ],
)
def test_completion_answers_a_mistake_with_an_error_object(live: Live, status: int, body: dict[str, object]) -> None:
    answer = live.post("/v1/completions", **body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_official_client_maps_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not here; there is 'builtin'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="builtin", prompt="a", temperature=-1)
    assert [model.id for model in client.models.list()] == ["builtin"]
    assert client.models.retrieve("builtin").id == "builtin"


def test_stream_ends_when_the_client_disconnects(live: Live) -> None:
    body = {"prompt": STORY, "max_tokens": 400, "temperature": 0.7, "stream": True}
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    assert until(lambda: num_requests(live.url) == 0)


def test_stream_survives_killed_servers(live: Live, plain: Engine) -> None:
    expected = plain.generate(STORY, max_new_tokens=120).text
    body = {"prompt": STORY, "max_tokens": 120, "temperature": 0, "stream": True}
    text, killed = "", list[int]()
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if not line or line.endswith("[DONE]"):
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if not killed and len(text) > 40:
                killed = live.children
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
    assert killed
    assert text == expected
    assert live.get("/health").status_code == 200
    assert all(server["alive"] for server in live.get("/health").json()["servers"])
