"""What a forked process does first."""

import multiprocessing

import torch

from dsi.models.process_utils import run_in_thread


def multiply() -> None:
    torch.set_num_threads(2)
    torch.ones(256, 256).matmul(torch.ones(256, 256)).sum().item()


def test_run_in_thread_computes_with_threads_in_a_process_forked_after_others_did() -> None:
    threads = torch.get_num_threads()
    try:
        multiply()
        process = multiprocessing.get_context("fork").Process(target=run_in_thread, args=(multiply,), daemon=True)
        process.start()
        process.join(30)
        assert process.exitcode == 0
    finally:
        torch.set_num_threads(threads)
