"""The memory of forked processes."""

import multiprocessing
import os

from dsi.fleets.memory import memory_use, process_tree

MIB = 2**20


def test_memory_use_counts_what_forked_processes_share_once() -> None:
    weights = bytearray(os.urandom(1)) * (64 * MIB)
    before = memory_use([])
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=theirs.recv, daemon=True)
    child.start()
    try:
        assert child.pid in process_tree(os.getpid())
        after = memory_use([child.pid or 0])
    finally:
        ours.send(None)
        child.join()
    assert before
    assert after
    assert len(weights) == 64 * MIB
    assert after.processes == before.processes + 1
    assert after.shared > 60
    assert after.total < before.total + 40
    assert str(after).endswith(" MiB of it shared")
    assert after.json()["processes"] == after.processes


def test_memory_use_leaves_out_a_process_that_has_ended() -> None:
    use = memory_use([2**22 + 1])
    assert use
    assert use.processes == 1
