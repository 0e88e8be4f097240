from itertools import zip_longest

import pytest

import dsi
from dsi.core.messages import Sampling, Verify
from dsi.core.policies import autoregressive, distributed, load_aware
from dsi.core.request import Request, ScoreRequest
from dsi.core.scheduler import MAX_TRACKED_REQUESTS
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import MAX_FAILURES, EngineLoop, FleetError
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.spans import Span
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SETTING = SimulationConfig(LatencyModel(20.0, 2.0), 0.8, sp=3, tokens=30)
PROMPT = (1, 2, 3)


def test_loop_streams_the_tokens_of_the_completion() -> None:
    [done] = EngineLoop(SETTING.simulated(1)).run(Request(PROMPT, 30, distributed(3)))
    parts = list(EngineLoop(SETTING.simulated(1)).tokens(Request(PROMPT, 30, distributed(3))))
    assert tuple(token for part in parts for token in part) == done.tokens
    assert 1 < len(parts) < 30
    assert len(done.tokens) == len(done.times) == 30
    assert (done.finish_reason, done.elapsed) == ("length", done.times[-1])
    assert sorted(done.times) == list(done.times)


def test_loop_cancels_a_stream_closed_early() -> None:
    fleet = SETTING.simulated(1)
    engine = EngineLoop(fleet)
    stream = engine.tokens(Request(PROMPT, 1000, distributed(3)))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine._owners == {}
    with pytest.raises(RuntimeError, match="nothing to do"):
        list(iter(fleet.next_event, None))


def test_loop_cancel_keeps_verified_tokens() -> None:
    engine = EngineLoop(SETTING.simulated(1))
    run = engine.submit(Request(PROMPT, 1000, autoregressive()))
    while len(run.tokens) < 5:
        engine.step()
    with pytest.raises(RuntimeError, match="still running"):
        run.completion()
    engine.cancel(run)
    done = run.completion()
    assert (len(done.tokens), done.finish_reason) == (5, "cancelled")


def test_loop_leaves_no_job_behind() -> None:
    engine = EngineLoop(SETTING.simulated(1))
    engine.run(*(Request(PROMPT, 30, distributed(k)) for k in (1, 2, 3)))
    assert engine._owners == {}


def test_loop_runs_requests_at_once_without_changing_texts() -> None:
    requests = [Request((i, i + 1), 20, distributed(1 + i % 3)) for i in range(6)]
    together = EngineLoop(SETTING.simulated(4)).run(*requests)
    apart: list[Tokens] = [EngineLoop(SETTING.simulated(4)).run(request)[0].tokens for request in requests]
    assert [done.tokens for done in together] == apart


def test_loop_runs_more_requests_than_are_tracked() -> None:
    requests = [Request((i,), 12, distributed(2)) for i in range(MAX_TRACKED_REQUESTS + 8)]
    done = EngineLoop(SETTING.with_latency(target_ttft_ms=50.0).simulated(4)).run(*requests)
    assert {len(completion.tokens) for completion in done} == {12}


def test_loop_starts_no_deeper_job_before_a_waiting_root() -> None:
    """Many requests, one target: every root is verified in turn, and hardly any speculation is."""
    log: list[Span] = []
    config = SimulationConfig(LatencyModel(20.0, 1.0), 0.9, sp=1, tokens=10)
    requests = [Request((i,), 10, distributed(2)) for i in range(8)]
    done = EngineLoop(config.simulated(4, log)).run(*requests)
    begun = [span for span in log if span.kind == "verify"]
    assert len({span.context.origin for span in begun[:8]}) == 8
    slowest, fastest = max(d.elapsed for d in done), min(d.elapsed for d in done)
    assert slowest < 2.5 * fastest


def test_loop_ends_a_request_whose_jobs_always_fail() -> None:
    fleet = SimulatedFleet(SETTING.servers(0), fails=lambda job: isinstance(job, Verify))
    with pytest.raises(
        FleetError,
        match=f"{MAX_FAILURES + 1} verifications of one request failed in a row, the last: the forward failed",
    ):
        EngineLoop(fleet).run(Request(PROMPT, 30, distributed(2)))


def test_loop_public_names() -> None:
    assert all(getattr(dsi, name) is not None for name in dsi.__all__)
    assert set(dsi.__all__) < set(dir(dsi))
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = dsi.nothing_such


def test_loop_streams_at_once_lose_no_token() -> None:
    engine = EngineLoop(SETTING.simulated(4))
    requests = [Request((i,), 30, distributed(2)) for i in range(2)]
    streams = [engine.tokens(request) for request in requests]
    texts: list[list[int]] = [[], []]
    for parts in zip_longest(*streams, fillvalue=()):
        for text, part in zip(texts, parts):
            text += part
    apart = [EngineLoop(SETTING.simulated(4)).run(request)[0].tokens for request in requests]
    assert [tuple(text) for text in texts] == apart


def test_loop_failure_of_one_request_spares_the_others() -> None:
    doomed = Request((1,), 30, distributed(2))
    fleet = SimulatedFleet(SETTING.servers(0), fails=lambda job: job.context.origin.prompt == (1,))
    engine = EngineLoop(fleet)
    bad, good = engine.submit(doomed), engine.submit(Request((2,), 30, distributed(2)))
    while not (bad.done and good.done):
        engine.step()
    assert len(good.completion().tokens) == 30
    with pytest.raises(FleetError, match="failed in a row"):
        bad.completion()
    assert engine._owners == {}


def test_loop_survives_many_missing_drafters() -> None:
    names = tuple(f"lost-{i}" for i in range(20))
    [done] = EngineLoop(SETTING.simulated(0)).run(Request(PROMPT, 10, distributed(2, (*names, "drafter"))))
    assert len(done.tokens) == 10


def test_loop_under_load_keeps_texts_and_hardly_speculates() -> None:
    loop = EngineLoop(SETTING.simulated(1))
    loop.load.targets = 3
    policy = load_aware(distributed(3), SpecConfig(lookahead=3), loop.load)
    done = loop.run(*(Request((1, 2, i), 30, policy) for i in range(12)))
    alone = [EngineLoop(SETTING.simulated(1)).run(Request((1, 2, i), 30, autoregressive()))[0] for i in range(12)]
    assert [each.tokens for each in done] == [each.tokens for each in alone]
    greedy = EngineLoop(SETTING.simulated(1)).run(*(Request((1, 2, i), 30, distributed(3)) for i in range(12)))
    stale, would_be = (sum(each.tally.abandoned for each in runs) for runs in (done, greedy))
    assert stale < would_be / 4
    assert max(each.elapsed for each in done) < max(each.elapsed for each in greedy)
    assert (loop.load.requests, loop.load.verifying) == (0, 0)


def test_loop_under_load_is_fair() -> None:
    loop = EngineLoop(SETTING.simulated(1))
    policy = load_aware(distributed(3), SpecConfig(lookahead=3), loop.load)
    runs = [loop.submit(Request((1, 2, i), 200, policy)) for i in range(8)]
    for _ in range(2000):
        loop.step()
    lengths = [len(run.tokens) for run in runs]
    assert min(lengths) > 0.6 * max(lengths)


def test_loop_under_load_never_waits_for_a_slow_drafter() -> None:
    """With a drafter slower than the target, all together take no longer than plain decoding.

    But for the first and the last, which are alone for a moment and speculate then.
    """
    slow = SimulationConfig(LatencyModel(10.0, 40.0), 0.5, sp=1, tokens=20)
    loop = EngineLoop(slow.simulated(1))
    policy = load_aware(distributed(3), SpecConfig(lookahead=3), loop.load)
    shared = max(each.elapsed for each in loop.run(*(Request((1, 2, i), 20, policy) for i in range(4))))
    plain = EngineLoop(slow.simulated(1)).run(*(Request((1, 2, i), 20, autoregressive()) for i in range(4)))
    assert shared <= max(each.elapsed for each in plain) + 2 * 10


def test_loop_runs_a_score_request() -> None:
    loop = EngineLoop(SETTING.simulated(1))
    [done] = loop.run(ScoreRequest(PROMPT, Sampling(logprobs=2)))
    assert (done.tokens, done.finish_reason, done.tally.forwards) == ((), "length", 1)
