import pytest
import torch

from dsi.models.cuda.green_contexts import green_context_streams, size_of_slice


@pytest.mark.parametrize(("slices", "size"), [(1, 128 + 0), (8, 16), (16, 8), (5, 24)])
def test_slices_are_equal_and_in_steps_of_eight(slices: int, size: int) -> None:
    assert size_of_slice(132, slices) == size


def test_more_slices_than_a_gpu_has_are_refused() -> None:
    with pytest.raises(ValueError, match="17 slices of a GPU of 132 multiprocessors: must be 1 to 16"):
        size_of_slice(132, 17)
    with pytest.raises(ValueError, match="9 slices for the servers: the GPU is cut into 8"):
        green_context_streams(0, 8, [2] + [1] * 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_a_stream_for_each_slice() -> None:
    lanes = green_context_streams(0, 16, [2] + [1] * 7)
    assert len({lane.cuda_stream for lane in lanes}) == 8
