"""Many requests at once: `dsi serve` beside transformers' plain batched `generate` on the same cores. Measured.

So many clients each stream one text from the server, all at the same time, greedy; transformers generates the same
texts in one batch, padded on the left, with a thread for each core. Interleaved; the clients run on the same cores.
Every text is compared with the one it has alone. Then a short request behind many long ones: its time over that
alone. On a GPU, with `--device cuda:0`, both have all of it, and a pair that `random_llama.py` has made is a model of
real size. `--check` exits with status 1 unless the server is at least 1.5 and 1.2 times as fast with 8 and 32 texts, 64
streams have 3 times the tokens per second of one, and the short request takes less than 5 times its time alone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from dsi.core.messages import TARGET
from dsi.engine.build import silence_transformers
from dsi.models.names import BUILTIN, model_path
from serve import server

CPU = "cpu"
STREAMS = (1, 8, 32, 64, 256)
LONG_REQUESTS, SHORT_TOKENS = 16, 4
WANTED = {8: 1.5, 32: 1.2}  # the server's speed over transformers', by streams
WANTED_GAIN, WANTED_STREAMS = 3.0, 64  # of so many streams over one
MAX_DELAY = 5.0  # of a short request behind long ones, over its time alone
OPENINGS = ("Once upon a time there was a little", "One day a big", "In a small house lived a brave", "Long ago a kind")
WORDS = "fox cat dog girl boy bear tree king bird fish cow hen pig owl car ball".split()  # noqa: SIM905
PLACES = ("in the woods", "by the sea", "on a hill", "near the town")


def prompts(count: int) -> list[str]:
    made = [f"{opening} {word} {place}" for place in PLACES for opening in OPENINGS for word in WORDS]
    return made[:count]


@dataclass(frozen=True)
class Client:
    """Streams completions from a server, over plain sockets: whatever the clients compute, the server cannot."""

    host: str
    port: int
    algorithm: str

    @classmethod
    def of(cls, url: str, algorithm: str) -> Client:
        host, port = url.removeprefix("http://").split(":")
        return cls(host, int(port), algorithm)

    async def text(self, prompt: str, tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        encoded = json.dumps({**body, "algorithm": self.algorithm}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(encoded)}\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        writer.write(head.encode() + encoded)
        answer = (await reader.read()).decode()
        writer.close()
        lines = [line for line in answer.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        if not chunks or any("error" in chunk for chunk in chunks):
            harness.fail(f"the server answered {answer[-300:]!r}")
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    def texts(self, asked: Sequence[str], tokens: int) -> list[str]:
        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(self.text(prompt, tokens) for prompt in asked))

        return asyncio.run(all_of_them())

    def delay(self, long: Sequence[str], tokens: int, short: str) -> float:
        """How long a short request takes that comes while these long ones are running."""

        async def run() -> float:
            others = [asyncio.ensure_future(self.text(prompt, tokens)) for prompt in long]
            await asyncio.sleep(0.1)
            began = perf_counter()
            await self.text(short, SHORT_TOKENS)
            took = perf_counter() - began
            await asyncio.gather(*others)
            return took

        return asyncio.run(run())


class Batched:
    """transformers' own batched `generate`."""

    def __init__(self, target: str, dtype: str, device: str) -> None:
        path = model_path(target, TARGET)
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()

    def texts(self, asked: Sequence[str], tokens: int) -> list[str]:
        batch = self._tokenizer(list(asked), return_tensors="pt", padding=True).to(self._model.device)
        lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        with torch.inference_mode():
            ids = self._model.generate(**batch, **lengths, do_sample=False, pad_token_id=self._tokenizer.pad_token_id)
        return self._tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :])  # type: ignore[no-any-return]


def timed(writer: Any, tokens: int) -> Any:
    def run(asked: Sequence[str]) -> tuple[float, list[str]]:
        began = perf_counter()
        texts = writer.texts(asked, tokens)
        return len(asked) * tokens / (perf_counter() - began), texts

    return run


def compare(client: Client, batched: Batched, alone: dict[str, str], streams: int, options: Any) -> dict[str, Any]:
    """Tokens per second of both with so many texts, and how many of the texts are not those alone."""
    asked = prompts(streams)
    rows = harness.interleave(
        {"server": timed(client, options.tokens), "transformers": timed(batched, options.tokens)},
        [asked],
        repeats=options.repeats,
        warm_up=1,
        quiet=True,
    )
    speeds = {name: [speed for speed, _ in runs] for name, runs in rows.items()}
    differing = {
        name: sum(text != alone[prompt] for _, texts in runs for prompt, text in zip(asked, texts))
        for name, runs in rows.items()
    }
    ratios = harness.ratios(speeds["server"], speeds["transformers"])
    return {"streams": streams, "tokens_per_second": speeds, "ratios": ratios, "differing": differing}


def delays(client: Client, options: Any) -> dict[str, Any]:
    """The time of a short request alone and behind long ones, interleaved."""
    short, long = "A bird sang", prompts(LONG_REQUESTS)
    alone, behind = [], []
    for _ in range(options.repeats + 1):
        alone.append(client.delay([], 0, short))
        behind.append(client.delay(long, 4 * options.tokens, short))
    ratios = harness.ratios(behind[1:], alone[1:])
    return {"alone_ms": [1000 * s for s in alone[1:]], "behind_ms": [1000 * s for s in behind[1:]], "ratios": ratios}


def lines(results: dict[str, Any]) -> list[str]:
    heads = ("streams", "server, tokens/s", "transformers batched", "ratio", "texts that differ", "of transformers")
    rows = [
        (
            row["streams"],
            *(f"{median(row['tokens_per_second'][name]):.0f}" for name in ("server", "transformers")),
            harness.extremes(row["ratios"]),
            *row["differing"].values(),
        )
        for row in results["load"]
    ]
    short = results["short"]
    delay = f"{SHORT_TOKENS} tokens behind {LONG_REQUESTS} long requests: {median(short['behind_ms']):.0f} ms, alone"
    return [
        *harness.table(heads, rows),
        f"{delay} {median(short['alone_ms']):.0f} ms: {harness.extremes(short['ratios'])} times",
    ]


def check(results: dict[str, Any]) -> None:
    speed = {row["streams"]: median(row["tokens_per_second"]["server"]) for row in results["load"]}
    for row in results["load"]:
        if (wanted := WANTED.get(row["streams"])) and median(row["ratios"]) < wanted:
            harness.fail(f"{row['streams']} streams: {median(row['ratios']):.2f} of transformers, not {wanted}")
    if {1, WANTED_STREAMS} <= speed.keys() and speed[WANTED_STREAMS] < WANTED_GAIN * speed[1]:
        harness.fail(f"{WANTED_STREAMS} streams: {speed[WANTED_STREAMS] / speed[1]:.2f} times one, not {WANTED_GAIN}")
    if median(results["short"]["ratios"]) > MAX_DELAY:
        harness.fail(f"a short request takes {median(results['short']['ratios']):.1f} times its time alone")


def main() -> None:
    parser = harness.arguments(__doc__, "--streams 1,8 --repeats 1", tokens=96, repeats=3)
    allowed = harness.names(*map(str, STREAMS))
    parser.add_argument("--streams", type=allowed, default=list(map(str, STREAMS)), help="default: all of them")
    parser.add_argument(
        "--target", default=BUILTIN, help="a folder, say of benchmarks/random_gpt2.py; default: builtin"
    )
    parser.add_argument("--drafter", default=BUILTIN, help="likewise, or ngram")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default=CPU, help="cpu, or cuda:0: all of one GPU for both")
    parser.add_argument("--algorithm", default="auto", help="of the server; default: auto")
    parser.add_argument("--check", action="store_true", help="exit with status 1 unless it is fast enough")
    options = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    streams = list(map(int, options.streams))
    models = {"target": options.target, "drafter": options.drafter, "dtype": options.dtype}
    if options.device != CPU:
        if not torch.cuda.is_available():
            parser.error(f"--device {options.device}: there is no GPU here")
        models |= {"target_devices": options.device, "drafter_device": options.device}
    batched = Batched(options.target, options.dtype, options.device)
    arguments = [argument for name, value in models.items() for argument in (f"--{name.replace('_', '-')}", value)]
    with server(max(STREAMS), *arguments) as (url, _):
        client, plain = Client.of(url, options.algorithm), Client.of(url, "nonsi")
        asked = prompts(max(streams))
        texts = [plain.texts([prompt], options.tokens)[0] for prompt in harness.tracked(asked, len(asked), "texts")]
        alone = dict(zip(asked, texts))
        counts = harness.tracked(streams, len(streams), "numbers of streams")
        load = [compare(client, batched, alone, count, options) for count in counts]
        results = {**models, "tokens": options.tokens, "load": load, "short": delays(client, options)}
    harness.report(options, "measured", results, lines(results))
    if any(row["differing"]["server"] for row in results["load"]):
        harness.fail("the server's texts are not those that they have alone")
    if options.check:
        check(results)


if __name__ == "__main__":
    main()
