"""Memory of `dsi serve` over many short requests on the built-in pair, 32 at a time. Measured.

Proportional set size of the server and its processes, in MiB, after every 500 requests. KV caches of 256 texts fill
up first, and what the allocator keeps around them: after `--warm-up` requests memory should be flat. Every text is
compared with the one it has alone. `--check` exits with status 1 if memory grows by more than 3% after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import harness
from batches import Client, prompts
from dsi.engine.engine import Engine
from serve import memory_mib, server

STREAMS, STEP = 32, 500
MAX_GROWTH = 1.03


def waves(client: Client, alone: dict[str, str], count: int, tokens: int) -> int:
    """Send so many requests; return how many texts are not those alone."""

    async def stream(asked: Sequence[str]) -> int:
        return sum([await client.text(prompt, tokens) != alone[prompt] for prompt in asked])

    async def run() -> int:
        asked = [prompt for _ in range(count // len(alone) + 1) for prompt in alone][:count]
        return sum(await asyncio.gather(*(stream(asked[i::STREAMS]) for i in range(STREAMS))))

    return asyncio.run(run())


def measure(options: Any) -> dict[str, Any]:
    with Engine.load(algorithm="nonsi") as engine:
        alone = {
            prompt: engine.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True).text
            for prompt in prompts(256)
        }
    differing, memory, steps = 0, [], (options.warm_up + options.requests) // STEP
    with server(STREAMS) as (url, pid):
        client = Client.of(url, "auto")
        for _ in harness.tracked(range(steps), steps, f"times {STEP} requests"):
            differing += waves(client, alone, STEP, options.tokens)
            memory.append(memory_mib(pid))
    counts = {"warm_up": options.warm_up, "requests": options.requests, "tokens": options.tokens}
    return {**counts, "differing": differing, "memory_mib": memory}


def lines(results: dict[str, Any]) -> list[str]:
    rows = [(STEP * i, f"{mib:.0f}") for i, mib in enumerate(results["memory_mib"], 1)]
    return [*harness.table(("requests", "MiB"), rows), f"texts that differ: {results['differing']}"]


def main() -> None:
    parser = harness.arguments(__doc__, "--warm-up 500 --requests 500", warm_up=5000, requests=5000, tokens=4)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if memory grows")
    options = parser.parse_args()
    results = measure(options)
    harness.report(options, "measured", results, lines(results))
    if results["differing"]:
        harness.fail("the server's texts are not those that they have alone")
    warm, last = results["memory_mib"][max(1, options.warm_up // STEP) - 1], results["memory_mib"][-1]
    if options.check and last > MAX_GROWTH * warm:
        harness.fail(f"{last:.0f} MiB, {warm:.0f} after {options.warm_up} requests")


if __name__ == "__main__":
    main()
