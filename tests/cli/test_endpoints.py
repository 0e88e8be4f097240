"""Commands over engines behind URLs."""

import pytest

from command import document, dsi
from dsi.core.messages import TARGET
from dsi.engine.build import cpu_model, load_for_cpu
from dsi.engine.endpoint_tokenizer import load_local
from dsi.models.names import BUILTIN, model_path
from dsi.models.protocol import SamplingModel
from live_server import Live, Serving
from stand_in_engine import StandInEngine

pytestmark = pytest.mark.slow

STORY = ", there was a little girl named Lily."


def test_generate_over_a_url_writes_the_targets_text(live: Live) -> None:
    done = dsi("generate", "Once upon a time", "--target", live.url, "--max-new-tokens", 12, "--lookahead", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(", there was a little")


def test_generate_over_a_url_refuses_what_it_cannot_do(live: Live) -> None:
    for options, sentence in {
        ("--target", "http://127.0.0.1:9"): "dsi: http://127.0.0.1:9: cannot be reached: ",
        (
            "--target",
            live.url,
            "--drafter",
            "ngram",
            "--rule",
            "reject",
            "--temperature",
            "1",
        ): "dsi: rule reject: endpoints",
        ("--target", live.url, "--drafter", "ngram", "--endpoint-key-file", "/nowhere"): "dsi: [Errno 2]",
    }.items():
        done = dsi("generate", "Once", "--algorithm", "nonsi", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(sentence)


def test_plan_measures_endpoints(live: Live) -> None:
    planned = document("plan", "--target", live.url, "--drafter", "builtin")
    assert {offer["algorithm"] for offer in planned["offers"]} == {"nonsi", "si", "pearl", "dsi"}
    assert 0.5 < planned["acceptance"] < 1
    assert planned["stream_ms"] > 0
    assert planned["command"].startswith(f"dsi generate --target {live.url} --drafter builtin --algorithm ")


def test_serve_in_front_of_engines_survives_one_that_dies(serving: Serving) -> None:
    model = SamplingModel(cpu_model(load_for_cpu(model_path(BUILTIN, TARGET), "float32")))
    tokenizer = load_local(BUILTIN)
    with StandInEngine("vllm", model, BUILTIN, tokenizer) as first:
        server = serving("--target", first.url, "--drafter", "ngram", "--algorithm", "dsi", "--lookahead", "2")
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        assert server.post("/v1/completions", **body).json()["choices"][0]["text"].startswith(STORY)
        assert server.get("/v1/models").json()["data"][0]["id"] == BUILTIN
        first.stop()
        first.start()
        assert server.post("/v1/completions", **body).json()["choices"][0]["text"].startswith(STORY)
        refused = server.post("/v1/completions", **body | {"logprobs": 1})
        assert refused.status_code == 400
        assert "logprobs" in refused.json()["error"]["message"]
