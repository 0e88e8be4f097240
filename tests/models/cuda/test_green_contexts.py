import pytest
import torch

from dsi.models.cuda.green_contexts import green_context_streams, sms_per_slice, stream_sms


@pytest.mark.parametrize(("slices", "size"), [(1, 128), (8, 16), (16, 8), (5, 24)])
def test_sms_per_slice_is_a_multiple_of_eight(slices: int, size: int) -> None:
    assert sms_per_slice(132, slices) == size


def test_green_contexts_refuse_too_many_slices() -> None:
    with pytest.raises(ValueError, match="17 slices of a GPU of 132 multiprocessors: must be 1 to 16"):
        sms_per_slice(132, 17)
    with pytest.raises(ValueError, match="9 slices for the servers: the GPU is cut into 8"):
        green_context_streams(0, 8, [2] + [1] * 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_green_context_streams_on_a_gpu() -> None:
    streams = green_context_streams(0, 16, [2] + [1] * 7)
    assert len({stream.cuda_stream for stream in streams}) == 8
    assert [stream_sms(stream) for stream in streams] == [16] + [8] * 7
    assert stream_sms(None) == 0
