import numpy as np

from dsi.core.messages import Sampling
from dsi.models.protocol import NEVER, ForwardRequest, SamplingModel
from dsi.models.toy import ToyTarget
from dsi.sampling.acceptance_rules import match


def test_sampling_model_samples_the_logits_of_its_backend() -> None:
    sampling = Sampling(temperature=0.8, seed=5)
    logits = ToyTarget(1).forward([4, 6, 8], 2, NEVER)
    assert np.shape(logits) == (2, 64)
    assert SamplingModel(ToyTarget(1)).answer(ForwardRequest([4, 6, 8], 2, sampling=sampling)) == match(
        logits, sampling, 2
    )


def test_forward_request_counts_positions_from_start() -> None:
    assert [ForwardRequest([1, 2, 3], start).num_positions for start in (0, 3, 4)] == [4, 1, 0]
