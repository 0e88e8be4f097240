"""How the events of a job travel from a worker to its fleet."""

from typing import Any, cast

import pytest

from dsi.core.messages import Draft, Job, Verify
from dsi.core.sequence import TokenSequence
from dsi.fleets import remote
from dsi.fleets.connection import Connection
from dsi.fleets.remote import NO_JOB, SharedCancelFlag, run_job
from dsi.fleets.servers import Server
from dsi.models.toy import ToyTarget

TEXT = TokenSequence.of((1, 2))


class Sent:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, list[Any], bool]] = []

    def send(self, message: tuple[int, list[Any], bool]) -> None:
        self.messages.append(message)


class Cell:
    value = NO_JOB


def batches(job: Job) -> list[int]:
    """How many forwards each message of a job tells of."""
    sent = Sent()
    run_job(job, Server("any", "any", ToyTarget(3)), cast(Connection, sent), SharedCancelFlag(Cell(), job.id))
    assert [last for _, _, last in sent.messages] == [False] * (len(sent.messages) - 1) + [True]
    return [len(forwards) for _, forwards, _ in sent.messages]


def test_run_job_sends_draft_tokens_when_they_can_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BATCH_SECONDS", 60.0)
    assert batches(Draft(1, TEXT, 12, block_size=5, first_block=3)) == [3, 5, 4]
    assert batches(Draft(1, TEXT, 10, block_size=5, first_block=5)) == [5, 5, 0]
    assert batches(Draft(1, TEXT, 2, block_size=5, first_block=5)) == [2]


def test_run_job_sends_slow_draft_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BATCH_SECONDS", 0.0)
    assert batches(Draft(1, TEXT, 3, block_size=5, first_block=5)) == [1, 1, 1, 0]


def test_run_job_sends_a_verification_with_the_end_of_its_job() -> None:
    assert batches(Verify(1, TEXT, 1)) == [1]
