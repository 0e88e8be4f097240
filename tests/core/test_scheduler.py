import pytest

from dsi.core.messages import Draft, Failed, Job, Prefill, Verify
from dsi.core.scheduler import MIN_PREFILL, Assignments, Scheduler
from dsi.core.sequence import TokenSequence

TEXT = TokenSequence.of((1, 2, 3))


def grown(text: TokenSequence, count: int) -> TokenSequence:
    for token in range(count):
        text = text.then(token)
    return text


def verification(id: int, lead: int = 0, context: TokenSequence = TEXT) -> Verify:
    return Verify(id, context, 1, lead)


def enqueued(scheduler: Scheduler, *jobs: Job) -> Assignments:
    for job in jobs:
        scheduler.enqueue(job)
    return scheduler.assign()


def released(scheduler: Scheduler, *servers: str) -> Assignments:
    for server in servers:
        scheduler.release(server)
    return scheduler.assign()


def test_scheduler_assigns_jobs_by_role() -> None:
    scheduler = Scheduler({"t": "target", "d": "drafter"})
    assert enqueued(scheduler, verification(1)) == [("t", verification(1))]
    assert enqueued(scheduler, Draft(2, TEXT, 4)) == [("d", Draft(2, TEXT, 4))]
    assert enqueued(scheduler, verification(3)) == []
    assert released(scheduler, "t") == [("t", verification(3))]


def test_scheduler_runs_root_verification_first() -> None:
    scheduler = Scheduler({"t": "target"})
    jobs = [verification(1, lead=5), verification(2, lead=2), verification(3), verification(4)]
    assert enqueued(scheduler, *jobs) == [("t", verification(3))]
    assert [released(scheduler, "t")[0][1].id for _ in range(3)] == [4, 1, 2]


def test_scheduler_runs_a_new_root_before_waiting_jobs() -> None:
    scheduler = Scheduler({"t": "target"})
    enqueued(scheduler, verification(1), verification(2, lead=4))
    scheduler.release("t")
    assert enqueued(scheduler, verification(3)) == [("t", verification(3))]


def test_scheduler_promotes_root_verification() -> None:
    scheduler = Scheduler({"t": "target"})
    enqueued(scheduler, verification(1))
    enqueued(scheduler, *(verification(id, lead=id) for id in (2, 3, 4)))
    scheduler.promote(4)
    scheduler.promote(99)
    assert [released(scheduler, "t")[0][1].id for _ in range(3)] == [4, 2, 3]


def test_scheduler_never_starts_a_cancelled_job() -> None:
    scheduler = Scheduler({"t": "target"})
    enqueued(scheduler, verification(1))
    enqueued(scheduler, verification(2))
    assert scheduler.cancel(2) == []
    assert scheduler.cancel(1) == ["t"]
    assert scheduler.cancel(77) == []
    assert released(scheduler, "t") == []


def test_scheduler_prefers_the_longest_cached_prefix() -> None:
    scheduler = Scheduler({"a": "target", "b": "target"})
    other = TokenSequence.of((9,))
    assert enqueued(scheduler, verification(1, context=other), verification(2)) == [
        ("a", verification(1, context=other)),
        ("b", verification(2)),
    ]
    released(scheduler, "a", "b")
    assert enqueued(scheduler, verification(3, context=TEXT.then(4)))[0][0] == "b"
    released(scheduler, "b")
    assert enqueued(scheduler, verification(4, context=other))[0][0] == "a"


def test_scheduler_does_not_count_a_cancelled_job_as_cached() -> None:
    scheduler = Scheduler({"a": "target", "b": "target"})
    enqueued(scheduler, verification(1), verification(2, lead=3, context=grown(TEXT, 3)))
    scheduler.cancel(2)
    released(scheduler, "a", "b")
    assert enqueued(scheduler, verification(3, context=TEXT.then(7)))[0][0] == "a"


def test_scheduler_prefills_idle_targets_only() -> None:
    scheduler = Scheduler({"a": "target", "b": "target", "c": "target", "d": "drafter"})
    enqueued(scheduler, verification(1))
    warm = Prefill(9, TEXT)
    assert enqueued(scheduler, warm) == [("b", warm), ("c", warm)]
    assert released(scheduler, "b") == []  # it has read it now


def test_scheduler_prefills_a_target_that_is_far_behind() -> None:
    scheduler = Scheduler({"a": "target"})
    enqueued(scheduler, verification(1))
    near, far = Prefill(9, grown(TEXT, MIN_PREFILL - 1)), Prefill(9, grown(TEXT, MIN_PREFILL))
    assert enqueued(scheduler, near) == []
    assert released(scheduler, "a") == []
    assert enqueued(scheduler, far) == [("a", far)]
    scheduler.cancel(9)
    assert released(scheduler, "a") == []


def test_scheduler_orphans_the_jobs_of_dead_servers() -> None:
    scheduler = Scheduler({"a": "target", "b": "target"})
    enqueued(scheduler, verification(1), verification(2), verification(3))
    scheduler.remove("a")
    assert scheduler.orphaned() == [Failed(1, "server a died")]
    scheduler.remove("b")
    assert scheduler.orphaned() == [Failed(2, "server b died"), Failed(3, "no target server is left")]
    assert enqueued(scheduler, verification(4)) == []
    assert scheduler.orphaned() == [Failed(4, "no target server is left")]
    assert scheduler.orphaned() == []
    with pytest.raises(ValueError, match="no server 'b'"):
        scheduler.remove("b")


def test_scheduler_gives_waiting_jobs_to_a_new_server() -> None:
    scheduler = Scheduler({"a": "target"})
    enqueued(scheduler, verification(1), verification(2))
    scheduler.add("b", "target")
    assert scheduler.assign() == [("b", verification(2))]
    with pytest.raises(ValueError, match="already there"):
        scheduler.add("b", "target")


def test_scheduler_keeps_the_queue_of_a_restarting_server() -> None:
    scheduler = Scheduler({"a": "target", "b": "target"})
    enqueued(scheduler, verification(1), verification(2))
    released(scheduler, "a", "b")
    assert enqueued(scheduler, verification(3)) == [("a", verification(3))]
    for server in ("a", "b"):
        scheduler.remove(server, restarts=True)
    assert scheduler.orphaned() == [Failed(3, "server a died")]
    assert (scheduler.has_jobs, enqueued(scheduler, verification(4)), scheduler.has_jobs) == (False, [], True)
    scheduler.add("b", "target")
    assert (scheduler.orphaned(), scheduler.assign()) == ([], [("b", verification(4))])
