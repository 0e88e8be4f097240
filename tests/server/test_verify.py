"""`POST /v1/verify` of a running server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from attackers import check_refused
from dsi import Engine
from dsi.core.sequence import Tokens
from live_server import Live

pytestmark = pytest.mark.slow

STORY = "Once upon a time"
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "top_k": 9, "min_p": 0.1}]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine.load(algorithm="nonsi") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=30) as client:
        yield client


def verify(client: httpx.Client, prompt: Tokens, num_positions: int, **options: Any) -> Tokens:
    answer = client.post("/v1/verify", json={"prompt": prompt, "num_positions": num_positions, **options})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "builtin"
    return tuple(answer.json()["tokens"])


def walk(client: httpx.Client, prompt: Tokens, expected: Tokens, cut: int, **options: Any) -> None:
    """Verify a text in blocks of any width, some with a wrong token in them, from its prompt to its end."""
    random, done, whole = Random(cut), 0, (*prompt, *expected)
    while done < len(expected):
        guesses = expected[done : done + random.randrange(0, 9)]
        at = random.randrange(len(guesses)) if guesses and random.random() < 0.5 else None
        if at is not None:
            guesses = (*guesses[:at], guesses[at] ^ 1, *guesses[at + 1 :])
        text = (*prompt, *expected[:done], *guesses)
        tokens = verify(client, text, len(guesses) + 1, prompt_length=len(prompt), **options)
        assert len(tokens) == len(guesses) + 1
        right = len(guesses) if at is None else at
        begin = len(prompt) + done
        assert tokens[: right + 1] == whole[begin : begin + right + 1] or begin + right >= len(whole)
        done += right + 1


@pytest.mark.parametrize("options", SAMPLINGS)
def test_verify_walks_the_text_that_generate_writes(client: httpx.Client, plain: Engine, options: Any) -> None:
    prompt = plain.tokenizer.encode(STORY)
    expected = plain.generate(STORY, max_new_tokens=80, ignore_eos=True, **options).tokens
    for cut in range(3):
        walk(client, prompt, expected, cut, **options)


def test_verify_beside_other_requests_changes_no_token(live: Live, client: httpx.Client, plain: Engine) -> None:
    prompt = plain.tokenizer.encode(STORY)
    expected = plain.generate(STORY, max_new_tokens=60, ignore_eos=True)
    body = {"prompt": STORY, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(5) as pool:
        walks = [pool.submit(walk, client, prompt, expected.tokens, cut) for cut in range(3)]
        texts = [pool.submit(live.post, "/v1/completions", **body) for _ in range(2)]
        for each in walks:
            each.result()
        assert [text.result().json()["choices"][0]["text"] for text in texts] == [expected.text] * 2


def test_verify_is_counted(live: Live, client: httpx.Client) -> None:
    before = live.metric("dsi:verified_positions_total"), live.metric("dsi:verification_latency_seconds_count")
    verify(client, (5, 6, 7), 2)
    after = live.metric("dsi:verified_positions_total"), live.metric("dsi:verification_latency_seconds_count")
    assert (after[0] - before[0], after[1] - before[1]) == (2, 1)
    assert live.metric('dsi:http_requests_total{method="POST",route="/v1/verify",status="200"}') >= 1
    assert live.metric('dsi:requests_total{endpoint="verify",outcome="ok"}') >= 1


@pytest.mark.parametrize(
    ("changes", "status", "param", "code"),
    [
        ({"prompt": [5] * 513}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [5, 1 << 20]}, 400, "prompt", None),
        ({"prompt": []}, 400, "prompt", "value_error"),
        ({"prompt": [5, True]}, 400, "prompt", "value_error"),
        ({"prompt": "Once"}, 400, "prompt", "value_error"),
        ({"num_positions": 0}, 400, "num_positions", "greater_than_equal"),
        ({"num_positions": 4}, 400, "num_positions", None),
        ({"num_positions": 513}, 400, "num_positions", "less_than_equal"),
        ({"prompt_length": 4}, 400, "prompt_length", None),
        ({"temperature": -1}, 400, "temperature", "greater_than_equal"),
        ({"temprature": 1}, 400, "temprature", "unknown_parameter"),
        ({"model": "another"}, 404, "model", "model_not_found"),
    ],
)
def test_verify_refuses_by_field(
    client: httpx.Client, changes: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    answer = client.post("/v1/verify", json={"prompt": [5, 6, 7], "num_positions": 1, **changes})
    error = check_refused(answer, status)
    assert (error["param"], error["code"]) == (param, code)


def test_verify_takes_a_text_as_long_as_the_context(client: httpx.Client) -> None:
    assert len(verify(client, (5,) * 512, 512, model="builtin")) == 512
