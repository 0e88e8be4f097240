"""Memory of `dsi serve` over many short requests on the built-in pair, 32 at a time. Measured.

Proportional set size of the server and its processes, in MiB, after every tenth of the requests. Every text is
compared with the one it has alone. `--check` exits with status 1 if it grows by more than 5% in the second half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import harness
from batches import Client, prompts
from dsi.engine.engine import Engine
from serve import memory_mib, server

STREAMS, POINTS = 32, 10
MAX_GROWTH = 1.05


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
    differing, memory = 0, []
    with server(STREAMS) as (url, pid):
        client = Client.of(url, "auto")
        for _ in harness.tracked(range(POINTS), POINTS, "parts"):
            differing += waves(client, alone, options.requests // POINTS, options.tokens)
            memory.append(memory_mib(pid))
    return {"requests": options.requests, "tokens": options.tokens, "differing": differing, "memory_mib": memory}


def lines(results: dict[str, Any]) -> list[str]:
    step = results["requests"] // POINTS
    rows = [(step * i, f"{mib:.0f}") for i, mib in enumerate(results["memory_mib"], 1)]
    return [*harness.table(("requests", "MiB"), rows), f"texts that differ: {results['differing']}"]


def main() -> None:
    parser = harness.arguments(__doc__, "--requests 500", requests=5000, tokens=4)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if memory grows")
    options = parser.parse_args()
    results = measure(options)
    harness.report(options, "measured", results, lines(results))
    if results["differing"]:
        harness.fail("the server's texts are not those that they have alone")
    middle, last = results["memory_mib"][POINTS // 2 - 1], results["memory_mib"][-1]
    if options.check and last > MAX_GROWTH * middle:
        harness.fail(f"{last:.0f} MiB, {middle:.0f} after half of the requests")


if __name__ == "__main__":
    main()
