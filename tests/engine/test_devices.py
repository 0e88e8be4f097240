"""Devices and slices, as the options name them."""

import pytest

from dsi.engine.devices import Device, check_available, parse_devices, parse_placement


def test_parse_devices_reads_devices_and_slices() -> None:
    assert parse_devices("cuda:1, cuda:2") == [Device("cuda:1"), Device("cuda:2")]
    assert parse_devices("cuda:0/3") == [Device("cuda:0", 3, 0), Device("cuda:0", 3, 1), Device("cuda:0", 3, 2)]
    assert parse_devices("cuda:1+cuda:2, cpu") == [Device("cuda:1+cuda:2"), Device("cpu")]
    assert Device("cuda:1+cuda:2").parts == ("cuda:1", "cuda:2")


def test_parse_placement_gives_the_drafter_the_last_device_or_its_own() -> None:
    sliced = parse_placement("cuda:0/8", None)
    assert (len(sliced.targets), sliced.drafter) == (7, Device("cuda:0", 8, 7))
    apart = parse_placement("cuda:1,cuda:2", "cuda:0")
    assert apart.targets == (Device("cuda:1"), Device("cuda:2"))
    assert apart.drafter == Device("cuda:0")
    assert parse_placement("cuda:0/16", "cuda:0/16", 7).drafter == Device("cuda:0", 16, 15)
    assert len(parse_placement("cuda:0/8", None, 3).targets) == 3
    assert parse_placement("cuda:0+cuda:1", "cuda:2").targets == (Device("cuda:0+cuda:1"),)


@pytest.mark.parametrize(
    ("targets", "drafter", "sp", "sentence"),
    [
        ("gpu", None, None, "device 'gpu': must be cpu, cuda:0, cuda:0/8 for eight slices"),
        ("cuda:0+cuda:1/4", None, None, r"device 'cuda:0\+cuda:1/4': must be .* for one model over both"),
        ("cuda:0+", None, None, r"device 'cuda:0\+': must be"),
        ("cuda:0+cuda:1", None, None, r"'cuda:0\+cuda:1': has one place, and the drafter needs another"),
        ("cuda:0+cuda:1", "cuda:1/4", None, "cuda:1: is cut in 2 ways"),
        ("cuda:0/1", None, None, "device 'cuda:0/1': must have at least 2 slices"),
        ("cuda:0", None, None, "target devices 'cuda:0': has one place"),
        ("cuda:0,cuda:1", None, 2, "SP degree 2: 'cuda:0,cuda:1' has room for 1 targets"),
        ("cuda:0", "cuda:1,cuda:2", None, "drafter device 'cuda:1,cuda:2': must be one place"),
        ("cuda:0,cuda:1", None, 0, "SP degree 0: must be at least 1"),
        ("cuda:0/4", "cuda:0/8", None, "cuda:0: is cut in 2 ways"),
        ("cuda:0/4", "cuda:0", None, "cuda:0: is cut in 2 ways"),
        ("cuda:0/4", "cuda:0/4", None, "slice 3 of cuda:0: is given to two servers"),
    ],
)
def test_parse_placement_refuses_bad_devices(targets: str, drafter: str | None, sp: int | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_placement(targets, drafter, sp)


def test_check_available_refuses_missing_gpus() -> None:
    with pytest.raises(ValueError, match=r"cuda:99: there .* here"):
        check_available(parse_placement("cuda:99", "cpu"))
    with pytest.raises(ValueError, match=r"^cuda:99: there .* here"):
        check_available(parse_placement("cpu+cuda:99", "cpu"))
