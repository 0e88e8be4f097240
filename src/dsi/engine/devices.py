"""Devices of the servers: whole GPUs, several as one, or slices of a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DEVICE = re.compile(r"(cpu|cuda:(\d+)(?:/(\d+))?)")
SEVERAL = re.compile(r"(cpu|cuda:\d+)(\+(cpu|cuda:\d+))+")


@dataclass(frozen=True)
class Device:
    """A device, or one of several equal slices of it, or several devices as one: `cuda:0+cuda:1`."""

    name: str
    slices: int = 0  # 0: all of it
    slice: int = 0  # which one, from 0

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split("+"))

    @property
    def index(self) -> int:
        return cuda_index(self.name)


def cuda_index(name: str) -> int:
    return int(name.partition(":")[2] or 0)


@dataclass(frozen=True)
class Placement:
    """The device of each target, and the drafter's."""

    targets: tuple[Device, ...]
    drafter: Device


def parse_devices(text: str) -> list[Device]:
    """Parse `cuda:1,cuda:2` to two devices, `cuda:0/8` to eight slices, `cuda:1+cuda:2` to one device."""
    devices: list[Device] = []
    for part in text.split(","):
        if SEVERAL.fullmatch(part.strip()):
            devices.append(Device(part.strip()))
            continue
        match = DEVICE.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"device {part.strip()!r}: must be cpu, cuda:0, cuda:0/8 for eight slices of it, or "
                "cuda:0+cuda:1 for one model over both"
            )
        name, slices = match[1].partition("/")[0], int(match[3] or 0)
        if match[3] is not None and slices < 2:
            raise ValueError(f"device {part.strip()!r}: must have at least 2 slices, or none")
        devices += [Device(name, slices, i) for i in range(max(1, slices))]
    return devices


def parse_placement(targets: str, drafter: str | None, sp: int | None = None) -> Placement:
    """Give the first `sp` devices to the targets, and the last one to a drafter without a device of its own."""
    devices = parse_devices(targets)
    if drafter is not None:
        drafter_device = _parse_one(drafter)
    elif len(devices) > 1:
        drafter_device = devices.pop()
    else:
        raise ValueError(f"target devices {targets!r}: has one place, and the drafter needs another")
    if sp is not None and sp < 1:
        raise ValueError(f"SP degree {sp}: must be at least 1")
    if sp is not None and sp > len(devices):
        raise ValueError(f"SP degree {sp}: {targets!r} has room for {len(devices)} targets")
    placement = Placement(tuple(devices[:sp]), drafter_device)
    _check_disjoint([*placement.targets, drafter_device])
    return placement


def _check_disjoint(devices: Sequence[Device]) -> None:
    """No slice for two servers, and one way to cut a GPU: each cut begins with the same multiprocessors."""
    for name in sorted({name for device in devices for name in device.parts}):
        cuts = sorted({device.slices for device in devices if name in device.parts})
        if len(cuts) > 1:
            raise ValueError(f"{name}: is cut in {len(cuts)} ways, {cuts} slices, which would overlap")
    for device, count in Counter(devices).items():
        if count > 1 and device.slices:
            raise ValueError(f"slice {device.slice} of {device.name}: is given to two servers")


def _parse_one(text: str) -> Device:
    devices = parse_devices(text)
    if len(devices) > 1 and ("," in text):
        raise ValueError(f"drafter device {text!r}: must be one place")
    return devices[-1]  # of a GPU in slices, the last


def check_available(placement: Placement) -> None:
    """Refuse devices that this machine does not have."""
    import torch

    gpus = torch.cuda.device_count()
    for name in [part for device in (*placement.targets, placement.drafter) for part in device.parts]:
        if name != "cpu" and cuda_index(name) >= gpus:
            available = "there is no GPU here" if not gpus else f"there are {gpus} GPUs here, numbered from 0"
            raise ValueError(f"{name}: {available}; without --target-devices, the models run on the CPU")
