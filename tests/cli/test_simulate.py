"""`dsi simulate`."""

import pytest

from command import document_here, dsi_here

QUICK = ("--tokens", "20", "--repeats", "2")


def test_simulate_reports_one_algorithm() -> None:
    result = document_here("simulate", "--algorithm", "dsi", *QUICK)
    assert (result["algorithm"], result["label"], result["tokens"]) == ("dsi", "simulated", 20)
    assert result["mean_ms"] > 0
    assert set(result["busy"]) == {*(f"target-{i}" for i in range(1, 8)), "drafter"}


def test_simulate_compares_several_algorithms() -> None:
    compared = document_here("simulate", "--algorithm", "nonsi,si,pearl,dsi", *QUICK)
    means = {result["algorithm"]: result["mean_ms"] for result in compared["results"]}
    assert list(means) == ["nonsi", "si", "pearl", "dsi"]
    assert compared["speedups"]["dsi"]["si"] == pytest.approx(means["si"] / means["dsi"])
    table = dsi_here("simulate", "--algorithm", "nonsi,dsi", *QUICK).stdout
    assert "speed over non-SI" in table
    assert "simulated: means of 2 runs" in table


def test_simulate_reports_machines_requests_and_failures() -> None:
    flags = ("--nodes", "2", "--network-ms", "1", "--requests", "3", "--failures-per-hour", "9", *QUICK)
    table = dsi_here("simulate", "--algorithm", "nonsi,dsi", *flags).stdout
    for words in ("ms for one of 3", "tokens per second, in all", "time over none failing", "on 2 machines"):
        assert words in table
    result = document_here("simulate", "--algorithm", "dsi", *flags)
    assert (result["nodes"], result["requests"]) == (2, 3)
    assert result["unfailing_ms"] > 0


def test_simulate_takes_the_best_of_lists() -> None:
    result = document_here("simulate", "--algorithm", "dsi", "--lookahead", "1,3,9", "--min-draft", "0,2", *QUICK)
    assert (result["lookahead"] in (1, 3, 9), result["min_draft"] in (0, 2)) == (True, True)


def test_simulate_runs_in_real_time() -> None:
    result = document_here(
        "simulate", "--algorithm", "si", "--real-time", "--target-ms", "5", "--drafter-ms", "1", *QUICK
    )
    assert result["label"] == "waited"


def test_simulate_takes_every_option_of_the_fleet() -> None:
    options = {
        "drafters": "2",
        "cancel-points": "4",
        "target-ttft-ms": "60",
        "drafter-ttft-ms": "6",
        "per-token-ms": "0.1",
        "jitter": "0.1",
        "network-ms": "1",
        "network-jitter": "0.2",
        "nodes": "2",
        "requests": "2",
        "drafter-copies": "2",
        "failures-per-hour": "100",
        "repair-s": "1",
        "notice-ms": "5",
        "contention": "0.05",
        "max-lead": "20",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    plain = document_here("simulate", "--algorithm", "dsi", *QUICK)
    assert (
        document_here("simulate", "--algorithm", "dsi", *flags, "--no-thread-pool", *QUICK)["mean_ms"]
        > plain["mean_ms"]
    )


def test_simulate_accepts_the_names_of_the_last_release() -> None:
    old = "--patience 1 --horizon 20 --pieces 4 --no-eager --second-hit 0.5 --tree 8 --one-cache"
    new = (
        "--min-draft 1 --max-lead 20 --cancel-points 4 --no-thread-pool --runner-up-acceptance 0.5 --tree 8 --shared-kv"
    )
    command = ("simulate", "--algorithm", "dsi", *QUICK)
    result = document_here(*command, *new.split())
    assert document_here(*command, *old.split()) == result
    assert result["patience"] == result["min_draft"] == 1


def test_simulate_reports_progress_of_long_work() -> None:
    done = dsi_here("simulate", "--algorithm", "dsi", "--tokens", "200", "--repeats", "250", "--json")
    assert "of 250 runs" in done.stderr
    assert len(done.stdout.splitlines()) == 1
