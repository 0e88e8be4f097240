"""Results that a process computes: there when it has ended, given up if it was killed."""

import os
from multiprocessing import active_children

from dsi.planning.background import Results


def computed_beside(results: Results[int, int], key: int) -> bool:
    """Whether a result is there once the process that computes it has ended."""
    started = not results.is_ready(key)
    for process in active_children():
        process.join()
    return started and results.is_ready(key)


def test_results_are_computed_in_a_process() -> None:
    results: Results[int, int] = Results(lambda key: key * os.getpid())
    assert computed_beside(results, 3)
    assert results.has(3)
    assert not results.has(4)
    assert results[3] % 3 == 0
    assert results[3] != 3 * os.getpid()
    assert results[4] == 4 * os.getpid()


def test_results_of_a_killed_process_are_given_up() -> None:
    results: Results[int, int] = Results(lambda key: os._exit(1) if key else 0)
    assert not computed_beside(results, 1)
    assert not results.is_ready(1)
    assert active_children() == []
    assert computed_beside(results, 0)
