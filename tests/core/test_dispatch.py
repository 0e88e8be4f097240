from dsi.core.context import Context
from dsi.core.dispatch import LAG, Dispatch
from dsi.core.messages import Draft, Failed, Verify, Warm

TEXT = Context.of((1, 2, 3))


def grown(text: Context, count: int) -> Context:
    for token in range(count):
        text = text.then(token)
    return text


def watch(id: int, lead: int = 0, context: Context = TEXT) -> Verify:
    return Verify(id, context, 1, lead)


def test_jobs_go_to_idle_servers_of_their_role() -> None:
    dispatch = Dispatch({"t": "target", "d": "drafter"})
    assert dispatch.offer(watch(1)) == [("t", watch(1))]
    assert dispatch.offer(Draft(2, TEXT, 4)) == [("d", Draft(2, TEXT, 4))]
    assert dispatch.offer(watch(3)) == []
    assert dispatch.release("t") == [("t", watch(3))]


def test_the_watch_on_a_root_goes_before_any_deeper_job() -> None:
    dispatch = Dispatch({"t": "target"})
    dispatch.offer(watch(1))
    for job in (watch(2, lead=5), watch(3, lead=2), watch(4), watch(5)):
        assert dispatch.offer(job) == []
    order = [dispatch.release("t")[0][1].id for _ in range(4)]
    assert order == [4, 5, 2, 3]


def test_a_deep_job_that_becomes_the_watch_on_a_root_is_promoted() -> None:
    dispatch = Dispatch({"t": "target"})
    dispatch.offer(watch(1))
    for id in (2, 3, 4):
        dispatch.offer(watch(id, lead=id))
    dispatch.promote(4)
    dispatch.promote(99)
    assert [dispatch.release("t")[0][1].id for _ in range(3)] == [4, 2, 3]


def test_a_withdrawn_job_never_starts() -> None:
    dispatch = Dispatch({"t": "target"})
    dispatch.offer(watch(1))
    dispatch.offer(watch(2))
    assert dispatch.withdraw(2) == []
    assert dispatch.withdraw(1) == ["t"]
    assert dispatch.withdraw(77) == []
    assert dispatch.release("t") == []


def test_the_server_that_has_read_most_of_the_request_comes_first() -> None:
    dispatch = Dispatch({"a": "target", "b": "target"})
    other = Context.of((9,))
    assert dispatch.offer(watch(1, context=other))[0][0] == "a"
    assert dispatch.offer(watch(2))[0][0] == "b"
    for server in ("a", "b"):
        dispatch.release(server)
    assert dispatch.offer(watch(3, context=TEXT.then(4)))[0][0] == "b"
    dispatch.release("b")
    assert dispatch.offer(watch(4, context=other))[0][0] == "a"


def test_every_idle_target_reads_the_prompt_and_no_drafter_does() -> None:
    dispatch = Dispatch({"a": "target", "b": "target", "c": "target", "d": "drafter"})
    dispatch.offer(watch(1))
    warm = Warm(9, TEXT)
    assert dispatch.offer(warm) == [("b", warm), ("c", warm)]
    assert dispatch.release("b") == []  # it has read it now


def test_a_busy_target_catches_up_when_it_idles_and_only_if_far_behind() -> None:
    dispatch = Dispatch({"a": "target"})
    dispatch.offer(watch(1))
    near, far = Warm(9, grown(TEXT, LAG - 1)), Warm(9, grown(TEXT, LAG))
    assert dispatch.offer(near) == []
    assert dispatch.release("a") == []
    assert dispatch.offer(far) == [("a", far)]
    dispatch.withdraw(9)
    assert dispatch.release("a") == []


def test_a_dying_server_strands_its_job_and_the_last_one_all_of_them() -> None:
    dispatch = Dispatch({"a": "target", "b": "target"})
    for id in (1, 2, 3):
        dispatch.offer(watch(id))
    dispatch.remove("a")
    assert dispatch.stranded() == [Failed(1, "server a died")]
    dispatch.remove("b")
    assert dispatch.stranded() == [Failed(2, "server b died"), Failed(3, "no target server is left")]
    dispatch.offer(watch(4))
    assert dispatch.stranded() == [Failed(4, "no target server is left")]
    assert dispatch.stranded() == []


def test_a_server_that_joins_takes_what_waits() -> None:
    dispatch = Dispatch({"a": "target"})
    dispatch.offer(watch(1))
    dispatch.offer(watch(2))
    assert dispatch.add("b", "target") == [("b", watch(2))]
