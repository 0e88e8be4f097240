"""The drafter's choices on a target's text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsi.core.sequence import Tokens
from dsi.engine.trial import count_ranks, rank_of, ranked_choices, run_trial
from dsi.models.protocol import CancelFlag, ForwardRequest, SamplingModel
from dsi.models.toy import ToyDrafter, ToyTarget

TEXT: Tokens = (3, 1, 4, 1, 5, 9, 2, 6)


@dataclass
class RandomBackend:
    """Logits that depend on the position and its token alone."""

    forwards: int = 0

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        self.forwards += 1
        rows = [np.random.default_rng((i, tokens[i - 1])).normal(size=32) for i in range(start, len(tokens) + 1)]
        return np.array(rows, dtype=np.float32)


def test_ranked_choices_are_those_of_a_tree_and_take_one_forward() -> None:
    model = SamplingModel(backend := RandomBackend())
    choices = ranked_choices(model, TEXT, 3)
    assert backend.forwards == 1
    chain = tuple((i - 1, token) for i, token in enumerate(TEXT[3:]))
    request = ForwardRequest(TEXT[:3], 3, tree=chain, asked=range(len(chain)), num_children=[3] * (1 + len(chain)))
    assert tuple(choices) == model.answer_tree(request).children


def test_run_trial_counts_what_the_first_choice_hits() -> None:
    target = ToyTarget(3)
    trial = run_trial(lambda: target, lambda: ToyDrafter(target, 0.5, runner_up_acceptance=0.5), TEXT, 60, ())
    assert trial.hits == tuple(rank == 0 for rank in trial.ranks)
    assert set(trial.ranks) == {0, 1, 2, None}


def test_count_ranks_leaves_out_tokens_that_are_no_choice() -> None:
    assert [rank_of(token, (7, 8)) for token in (7, 8, 9)] == [0, 1, None]
    assert count_ranks([(0, None, 1), (0, 2)]) == (2, 1, 1)
