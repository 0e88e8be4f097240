"""Results that a process computes: there when it has ended, given up if it was killed."""

import os
import signal
import socket
import time
from multiprocessing import active_children

from dsi.planning.background import Results


def computed_beside(results: Results[int, int], key: int) -> bool:
    """Whether a result is there once the process that computes it has ended."""
    before = set(active_children())  # of other tests
    started = not results.is_ready(key)
    for process in set(active_children()) - before:
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
    before = set(active_children())
    assert not results.is_ready(1)
    assert set(active_children()) == before
    assert computed_beside(results, 0)


def sleeping(seconds: int) -> int:
    time.sleep(seconds)
    return seconds


def interrupted(key: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return key


def test_results_that_are_closed_leave_no_process() -> None:
    before = set(active_children())
    results: Results[int, int] = Results(sleeping)
    assert not results.is_ready(60)
    results.close()
    assert set(active_children()) == before
    assert computed_beside(results, 0)
    assert results.num_computed() == 1


def test_results_survive_an_interrupt_that_the_parent_handles() -> None:
    assert computed_beside(Results(interrupted), 4)


def test_process_of_results_keeps_no_connection_open() -> None:
    """Or the other end of one that is closed here would not see that."""
    results: Results[int, int] = Results(sleeping)
    ours, theirs = socket.socketpair()
    with ours:
        results.is_ready(60)
        theirs.close()
        ours.settimeout(30)
        assert ours.recv(1) == b""  # once the process has closed its copy
        results.close()
