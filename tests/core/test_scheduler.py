import pytest

from dsi.core.messages import Draft, Failed, Job, Prefill, Verify
from dsi.core.scheduler import MIN_PREFILL, Assignments, Scheduler
from dsi.core.sequence import TokenSequence

TEXT = TokenSequence.of((1, 2, 3))


def grown(text: TokenSequence, count: int) -> TokenSequence:
    for token in range(count):
        text = text.then(token)
    return text


def watch(id: int, lead: int = 0, context: TokenSequence = TEXT) -> Verify:
    return Verify(id, context, 1, lead)


def offered(dispatch: Scheduler, *jobs: Job) -> Assignments:
    for job in jobs:
        dispatch.enqueue(job)
    return dispatch.assign()


def released(dispatch: Scheduler, *servers: str) -> Assignments:
    for server in servers:
        dispatch.release(server)
    return dispatch.assign()


def test_scheduler_assigns_jobs_by_role() -> None:
    dispatch = Scheduler({"t": "target", "d": "drafter"})
    assert offered(dispatch, watch(1)) == [("t", watch(1))]
    assert offered(dispatch, Draft(2, TEXT, 4)) == [("d", Draft(2, TEXT, 4))]
    assert offered(dispatch, watch(3)) == []
    assert released(dispatch, "t") == [("t", watch(3))]


def test_scheduler_runs_root_verification_first() -> None:
    dispatch = Scheduler({"t": "target"})
    jobs = [watch(1, lead=5), watch(2, lead=2), watch(3), watch(4)]
    assert offered(dispatch, *jobs) == [("t", watch(3))]
    assert [released(dispatch, "t")[0][1].id for _ in range(3)] == [4, 1, 2]


def test_scheduler_runs_a_new_root_before_waiting_jobs() -> None:
    dispatch = Scheduler({"t": "target"})
    offered(dispatch, watch(1), watch(2, lead=4))
    dispatch.release("t")
    assert offered(dispatch, watch(3)) == [("t", watch(3))]


def test_scheduler_promotes_root_verification() -> None:
    dispatch = Scheduler({"t": "target"})
    offered(dispatch, watch(1))
    offered(dispatch, *(watch(id, lead=id) for id in (2, 3, 4)))
    dispatch.promote(4)
    dispatch.promote(99)
    assert [released(dispatch, "t")[0][1].id for _ in range(3)] == [4, 2, 3]


def test_scheduler_never_starts_a_cancelled_job() -> None:
    dispatch = Scheduler({"t": "target"})
    offered(dispatch, watch(1))
    offered(dispatch, watch(2))
    assert dispatch.cancel(2) == []
    assert dispatch.cancel(1) == ["t"]
    assert dispatch.cancel(77) == []
    assert released(dispatch, "t") == []


def test_scheduler_prefers_the_longest_cached_prefix() -> None:
    dispatch = Scheduler({"a": "target", "b": "target"})
    other = TokenSequence.of((9,))
    assert offered(dispatch, watch(1, context=other), watch(2)) == [
        ("a", watch(1, context=other)),
        ("b", watch(2)),
    ]
    released(dispatch, "a", "b")
    assert offered(dispatch, watch(3, context=TEXT.then(4)))[0][0] == "b"
    released(dispatch, "b")
    assert offered(dispatch, watch(4, context=other))[0][0] == "a"


def test_scheduler_does_not_count_a_cancelled_job_as_cached() -> None:
    dispatch = Scheduler({"a": "target", "b": "target"})
    offered(dispatch, watch(1), watch(2, lead=3, context=grown(TEXT, 3)))
    dispatch.cancel(2)
    released(dispatch, "a", "b")
    assert offered(dispatch, watch(3, context=TEXT.then(7)))[0][0] == "a"


def test_scheduler_prefills_idle_targets_only() -> None:
    dispatch = Scheduler({"a": "target", "b": "target", "c": "target", "d": "drafter"})
    offered(dispatch, watch(1))
    warm = Prefill(9, TEXT)
    assert offered(dispatch, warm) == [("b", warm), ("c", warm)]
    assert released(dispatch, "b") == []  # it has read it now


def test_scheduler_prefills_a_target_that_is_far_behind() -> None:
    dispatch = Scheduler({"a": "target"})
    offered(dispatch, watch(1))
    near, far = Prefill(9, grown(TEXT, MIN_PREFILL - 1)), Prefill(9, grown(TEXT, MIN_PREFILL))
    assert offered(dispatch, near) == []
    assert released(dispatch, "a") == []
    assert offered(dispatch, far) == [("a", far)]
    dispatch.cancel(9)
    assert released(dispatch, "a") == []


def test_scheduler_orphans_the_jobs_of_dead_servers() -> None:
    dispatch = Scheduler({"a": "target", "b": "target"})
    offered(dispatch, watch(1), watch(2), watch(3))
    dispatch.remove("a")
    assert dispatch.orphaned() == [Failed(1, "server a died")]
    dispatch.remove("b")
    assert dispatch.orphaned() == [Failed(2, "server b died"), Failed(3, "no target server is left")]
    assert offered(dispatch, watch(4)) == []
    assert dispatch.orphaned() == [Failed(4, "no target server is left")]
    assert dispatch.orphaned() == []
    with pytest.raises(ValueError, match="no server 'b'"):
        dispatch.remove("b")


def test_scheduler_gives_waiting_jobs_to_a_new_server() -> None:
    dispatch = Scheduler({"a": "target"})
    offered(dispatch, watch(1), watch(2))
    dispatch.add("b", "target")
    assert dispatch.assign() == [("b", watch(2))]
    with pytest.raises(ValueError, match="already there"):
        dispatch.add("b", "target")


def test_scheduler_keeps_the_queue_of_a_restarting_server() -> None:
    dispatch = Scheduler({"a": "target", "b": "target"})
    offered(dispatch, watch(1), watch(2))
    released(dispatch, "a", "b")
    assert offered(dispatch, watch(3)) == [("a", watch(3))]
    for server in ("a", "b"):
        dispatch.remove(server, restarts=True)
    assert dispatch.orphaned() == [Failed(3, "server a died")]
    assert (dispatch.has_jobs, offered(dispatch, watch(4)), dispatch.has_jobs) == (False, [], True)
    dispatch.add("b", "target")
    assert (dispatch.orphaned(), dispatch.assign()) == ([], [("b", watch(4))])
