"""What one event costs, and whether that grows with the text. Measured.

A single DSI request on seven targets in virtual time: `loop` is everything (engine, core, scheduler, heap,
toy models), `core` is the state machine alone. Processor time, so that a busy machine does not count.
Goal: a loop under 25 microseconds, flat within 25%.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import process_time

import harness
from dsi.core.messages import Event, Step
from dsi.core.request import Request
from dsi.fleets.loop import EngineLoop
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import PROMPT, SimulationConfig

LENGTHS = (50, 500, 5000)
MOST_MICROSECONDS, MOST_GROWTH = 25.0, 1.25


def microseconds_per_event(tokens: int, seed: int) -> tuple[float, float]:
    """Time the whole loop, and the core alone in a second run."""
    setting = SimulationConfig(LatencyModel(20.0, 2.0), 0.8, sp=7, tokens=tokens)
    return loop_microseconds(setting, seed), core_microseconds(setting, seed)


def loop_microseconds(setting: SimulationConfig, seed: int) -> float:
    engine, events = EngineLoop(setting.simulated(seed)), 0
    began = process_time()
    live = engine.submit(Request(PROMPT, setting.tokens, setting.policy("dsi")))
    while not live.done:
        engine.step()
        events += 1
    return (process_time() - began) / events * 1e6


def core_microseconds(setting: SimulationConfig, seed: int) -> float:
    engine = EngineLoop(setting.simulated(seed))
    live = engine.submit(Request(PROMPT, setting.tokens, setting.policy("dsi")))
    handle, spent, events = live.generation.handle, 0.0, 0

    def timed(event: Event) -> Step:
        nonlocal spent, events
        began = process_time()
        step = handle(event)
        spent += process_time() - began
        events += 1
        return step

    live.generation.handle = timed  # type: ignore[method-assign]
    while not live.done:
        engine.step()
    return spent / events * 1e6


def main() -> None:
    options = harness.arguments(__doc__, "--repeats 3", repeats=15).parse_args()
    contenders = {tokens: partial(microseconds_per_event, tokens) for tokens in LENGTHS}
    runs = harness.interleave(contenders, range(options.repeats))
    rows = [
        {"tokens": tokens, "loop_us": median(loop for loop, _ in times), "core_us": median(core for _, core in times)}
        for tokens, times in runs.items()
    ]
    loops = [row["loop_us"] for row in rows]
    growth = max(loops) / min(loops)
    met = max(loops) < MOST_MICROSECONDS and growth < MOST_GROWTH
    lines = harness.table(
        ("tokens", "loop us/event", "core us/event (measured)"),
        [(row["tokens"], f"{row['loop_us']:.1f}", f"{row['core_us']:.1f}") for row in rows],
    )
    verdict = f"growth {growth:.2f}; under {MOST_MICROSECONDS:g} us and flat within 25%: {'yes' if met else 'NO'}"
    harness.report(options, "measured", {"rows": rows, "growth": growth, "met": met}, [*lines, verdict])


if __name__ == "__main__":
    main()
