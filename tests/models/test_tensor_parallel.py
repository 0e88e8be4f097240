"""One model over several real processes: the same rows, the same texts, and nobody left behind."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

from cancel_flags import CancelAfter
from dsi.cli.main import app
from dsi.engine.build import cpu_model
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.models import tensor_parallel as parallel
from dsi.models.hf import Transformer, load_model
from dsi.models.names import model_path
from dsi.models.protocol import Cancelled
from dsi.models.tensor_parallel import RankLost, TensorParallel, check_tensor_parallel

pytestmark = pytest.mark.slow

PROMPTS = ("Once upon a time", "Tom and his dog", "One day a dragon")
SMALL = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
BIG = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0}

MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BIG | {"vocab_size": 96})),
    "llama with an odd vocabulary": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BIG)),
    "biases and grouped queries": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**BIG, num_key_value_heads=2)),
    "head norms": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**BIG, num_key_value_heads=2, head_dim=8)),
    "gathered shards": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**BIG)),
}


def make(name: str) -> Any:
    """Random weights, and biases that are not zero."""
    torch.manual_seed(0)
    model = MAKERS[name]().float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


@pytest.fixture
def split() -> Iterator[Callable[..., TensorParallel]]:
    """Create backends with one thread per rank, on any core."""
    started: list[TensorParallel] = []
    threads = torch.get_num_threads()

    def start(model: Any, size: int = 2, **options: Any) -> TensorParallel:
        started.append(TensorParallel(model, size, threads=1, **options))
        return started[-1]

    yield start
    for running in started:
        running.close()
    torch.set_num_threads(threads)


def forwards(seed: int, count: int, vocabulary: int) -> Iterator[tuple[list[int], int]]:
    """Texts that are extended, truncated and restarted, with requests for some positions or none."""
    rng = random.Random(seed)
    tokens = [1]
    for _ in range(count):
        num_shared = 0 if rng.random() < 0.1 else rng.randint(max(0, len(tokens) - 50), len(tokens))
        new_tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 9))]
        tokens = (tokens[:num_shared] + new_tokens)[-120:]
        yield tokens, rng.randint(max(1, len(tokens) - 8), len(tokens) + 1)


def same_logits(model: Any, one: Transformer, other: TensorParallel, count: int) -> bool:
    for tokens, start in forwards(3, count, min(96, model.config.vocab_size)):
        expected, actual = one.forward(tokens, start), other.forward(tokens, start)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    return True


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in MAKERS),
        ("llama", 1),
        ("llama", 4),
        ("gathered shards", 4),
    ],
)
def test_tensor_parallel_logits_are_those_of_the_whole_model(
    split: Callable[..., TensorParallel], name: str, size: int
) -> None:
    model = make(name)
    assert same_logits(model, cpu_model(model), split(model, size), 40)


def test_tensor_parallel_logits_of_the_built_in_target(split: Callable[..., TensorParallel]) -> None:
    model = load_model(model_path("builtin", "target"))
    assert same_logits(model, cpu_model(model), split(model), 25)


def test_tensor_parallel_shards_are_views() -> None:
    model = make("biases and grouped queries")
    whole = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    parts = TensorParallel(model, 2)._shards
    assert all(w.untyped_storage().data_ptr() in whole for part in parts for w in part.model.parameters())
    widths = {part.model.model.layers[0].mlp.down_proj.weight.shape for part in parts}
    assert widths == {torch.Size([32, 32])}


@pytest.mark.parametrize("name", ["llama", "biases and grouped queries"])
def test_tensor_parallel_cancels_all_ranks_at_the_same_point(split: Callable[..., TensorParallel], name: str) -> None:
    model = make(name)
    one, other = cpu_model(model), split(model)
    other.forward([5, 17, 3], 3)
    for checks in range(5):  # before the forward, and at each of its four reductions
        with pytest.raises(Cancelled):
            other.forward([5, 17, 3, 88, 41], 4, CancelAfter(checks))
        torch.testing.assert_close(
            other.forward([5, 17, 9, checks], 3), one.forward([5, 17, 9, checks], 3), atol=1e-4, rtol=1e-4
        )


def test_tensor_parallel_recovers_from_refused_requests(split: Callable[..., TensorParallel]) -> None:
    model = make("llama")
    one, other = cpu_model(model), split(model)
    for tokens, start, error in (
        ([], 0, ValueError),
        ([1] * 200, 200, ValueError),
        ([5, 900], 2, IndexError),
    ):
        with pytest.raises(error):
            other.forward(tokens, start)
        torch.testing.assert_close(other.forward([5, 17], 1), one.forward([5, 17], 1), atol=1e-4, rtol=1e-4)


def test_tensor_parallel_ranks_find_the_same_texts_in_their_caches(
    split: Callable[..., TensorParallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their tokens: the lists that hold them are others in each process."""
    monkeypatch.setattr(parallel, "TIMEOUT", timedelta(seconds=5))
    model = make("llama")
    one, other = cpu_model(model), split(model)
    texts = [[1, *range(2, 60)], [1, 70]]
    for _ in range(2):
        for text in texts:
            expected = one.forward(text, len(text))
            torch.testing.assert_close(other.forward(text, len(text)), expected, atol=1e-4, rtol=1e-4)
            text.append(5)


def test_tensor_parallel_detects_a_dead_rank(split: Callable[..., TensorParallel]) -> None:
    other = split(make("llama"))
    other.forward([5, 17], 2)
    os.kill(other.helpers[0].pid, signal.SIGKILL)
    with pytest.raises(RankLost):
        other.forward([5, 17, 3], 3)
    assert other.helpers == []


class Interrupted(BaseException):
    """As raised by Ctrl-C."""


class Interrupting(CancelAfter):
    def is_set(self) -> bool:
        if super().is_set():
            raise Interrupted
        return False


def test_tensor_parallel_restarts_ranks_after_an_interruption(split: Callable[..., TensorParallel]) -> None:
    model = make("llama")
    one, other = cpu_model(model), split(model)
    with pytest.raises(Interrupted):
        other.forward([5, 17, 3], 3, Interrupting(2))
    torch.testing.assert_close(other.forward([9, 8, 7], 1), one.forward([9, 8, 7], 1), atol=1e-4, rtol=1e-4)


def test_tensor_parallel_times_out_on_a_hanging_rank(
    split: Callable[..., TensorParallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "TIMEOUT", timedelta(seconds=1))
    other = split(make("llama"))
    other.forward([5, 17], 2)
    os.kill(other.helpers[0].pid, signal.SIGSTOP)
    with pytest.raises(RankLost):
        other.forward([5, 17, 3], 3)


def test_tensor_parallel_divides_the_cores_between_ranks() -> None:
    threads, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    other = TensorParallel(make("llama"), 2)
    try:
        other.forward([5, 17], 2)
        affinities = [os.sched_getaffinity(0), os.sched_getaffinity(other.helpers[0].pid)]
    finally:
        other.close()
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    assert affinities[0] | affinities[1] == set(cores)
    assert len(cores) == 1 or not affinities[0] & affinities[1]


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_layer=2, n_head=4, n_embd=32))


def experts() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**BIG, num_key_value_heads=4, num_local_experts=2))


def narrow() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**BIG | {"intermediate_size": 66}))


@pytest.mark.parametrize(
    ("maker", "size", "sentence"),
    [
        (MAKERS["llama"], 0, "target mp 0: must be at least 1"),
        (MAKERS["llama"], 3, "target mp 3: does not divide the model's 4 heads"),
        (MAKERS["biases and grouped queries"], 4, "target mp 4: does not divide the model's 2 key and value heads"),
        (narrow, 4, "target mp 4: does not divide the model's width of 66"),
        (gpt2, 2, "target mp 2: a gpt2 model has no plan by which it could be split"),
        (experts, 2, "target mp 2: a mixtral model is split by .*, which is not known here"),
    ],
)
def test_check_tensor_parallel_refuses_in_one_sentence(maker: Callable[[], Any], size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        check_tensor_parallel(maker(), size)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target_mp": 0}, "target mp 0: must be at least 1"),
        ({"target_mp": 4}, "target mp 4: does not divide the model's 6 heads"),
        ({"target_mp": 2, "target_devices": "cpu,cpu"}, "target mp 2: on devices a target is spread"),
    ],
)
def test_engine_refuses_target_mp_before_anything_starts(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Engine.load(**options)


@pytest.mark.parametrize("command", ["generate", "chat", "compare", "serve"])
def test_commands_take_target_mp(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: EngineConfig, **_: Any) -> None:
        raise ValueError(f"asked for {config.target_mp}")

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr("dsi.server.sockets.listen", lambda *_: None)
    words = [command, "--target-mp", "2", *(["Once"] if command == "generate" else [])]
    done = CliRunner().invoke(app, words)
    assert str(done.exception) == "asked for 2"


def test_engine_reports_ranks_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(ValueError, match="target mp 2: the processes do not work together"):
        Engine.load(target_mp=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(target_mp=2, threads=1) as loaded:  # on any core, which is fast on a busy machine
        yield loaded


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    with Engine.load() as whole:
        return {prompt: whole.generate(prompt, max_new_tokens=30).text for prompt in PROMPTS}


@pytest.mark.parametrize("algorithm", ["nonsi", "si", "dsi"])
def test_engine_text_is_that_of_the_whole_target(engine: Engine, expected: dict[str, str], algorithm: str) -> None:
    texts = {prompt: engine.generate(prompt, max_new_tokens=30, algorithm=algorithm).text for prompt in PROMPTS}
    assert texts == expected


def test_engine_seed_gives_one_text_under_every_algorithm(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 7}
    texts = {engine.generate(PROMPTS[0], algorithm=name, **options).text for name in ("nonsi", "si", "dsi")}
    assert len(texts) == 1


def helpers(engine: Engine, target: str) -> list[int]:
    """The ids of the rank processes that a target has started."""
    process = engine.fleet._workers[target].process.pid  # type: ignore[attr-defined]
    children = Path(f"/proc/{process}/task").glob("*/children")  # of each thread
    return [int(pid) for file in children for pid in file.read_text().split()]


def test_engine_loses_no_token_to_a_killed_rank(engine: Engine, expected: dict[str, str]) -> None:
    writing = engine.stream(PROMPTS[0], max_new_tokens=30)
    parts = []
    for part in writing:
        parts.append(part)
        if len(parts) == 1:  # there may be few: a verification can end many tokens
            [helper] = helpers(engine, "target-1")
            os.kill(helper, signal.SIGKILL)
    assert "".join(parts) == expected[PROMPTS[0]]
    end = time.monotonic() + 20
    while not engine.fleet.deaths and time.monotonic() < end:  # type: ignore[attr-defined]
        # the last forward of the first text may have ended before
        assert engine.generate(PROMPTS[1], max_new_tokens=30).text == expected[PROMPTS[1]]
    assert engine.fleet.deaths == {"target-1": 1}  # type: ignore[attr-defined]


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_engine_leaves_no_rank_process_behind(
    expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Engine.load(target_mp=2, sp=2) as engine:
        assert engine.generate(PROMPTS[1], max_new_tokens=30).text == expected[PROMPTS[1]]
        ranks = [helper for i in (1, 2) for helper in helpers(engine, f"target-{i}")]
    assert ranks
    end = time.monotonic() + 5
    while any(is_alive(helper) for helper in ranks) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(is_alive(helper) for helper in ranks)
    assert list(tmp_path.iterdir()) == []
