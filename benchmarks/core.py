"""What one event costs, and whether that grows with the text. Measured.

A single DSI request on seven targets in virtual time: `loop` is everything (engine, core, dispatch, heap,
toy models), `core` is the state machine alone. Processor time, so that a busy machine does not count.
Target: a loop under 25 microseconds, flat within 25%.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import process_time

from dsi.core.messages import Event, Step
from dsi.core.request import Request
from dsi.fleets.loop import EngineLoop
from dsi.planning.simulation import PROMPT, SimulationConfig

LENGTHS = (50, 500, 5000)
MOST_MICROSECONDS, MOST_GROWTH = 25.0, 1.25


def run(tokens: int, seed: int) -> tuple[float, float]:
    """Microseconds per event, of the loop and of the core."""
    setting = SimulationConfig(20.0, 2.0, 0.8, sp=7, tokens=tokens)
    engine = EngineLoop(setting.simulated(seed))
    began = process_time()
    live = engine.submit(Request(PROMPT, tokens, setting.policy("dsi")))
    events = 0
    while not live.done:
        engine.step()
        events += 1
    return (process_time() - began) / events * 1e6, core(setting, seed)


def core(setting: SimulationConfig, seed: int) -> float:
    """The same run again, with a stopwatch around the state machine."""
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


def measure(repeats: int) -> dict[int, tuple[float, float]]:
    """Medians, the lengths interleaved so that a noisy moment falls on all of them."""
    times: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in LENGTHS}
    for seed in range(repeats):
        for tokens in LENGTHS:
            times[tokens].append(run(tokens, seed))
    return {tokens: (median(a for a, _ in runs), median(b for _, b in runs)) for tokens, runs in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.repeats)
    loops = [loop for loop, _ in found.values()]
    growth = max(loops) / min(loops)
    met = max(loops) < MOST_MICROSECONDS and growth < MOST_GROWTH
    if options.json:
        rows = [{"tokens": n, "loop_us": loop, "core_us": core} for n, (loop, core) in found.items()]
        print(json.dumps({"label": "measured", "rows": rows, "growth": growth, "met": met}))
        return
    print("tokens   loop us/event   core us/event   (measured)")
    for tokens, (loop, alone) in found.items():
        print(f"{tokens:6}   {loop:13.1f}   {alone:13.1f}")
    print(f"growth {growth:.2f}; under {MOST_MICROSECONDS:g} us and flat within 25%: {'yes' if met else 'NO'}")


if __name__ == "__main__":
    main()
