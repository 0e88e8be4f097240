"""Which processor each server gets: whole devices, several as one, or slices of a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

NAME = re.compile(r"(cpu|cuda:(\d+)(?:/(\d+))?)")
SEVERAL = re.compile(r"(cpu|cuda:\d+)(\+(cpu|cuda:\d+))+")


@dataclass(frozen=True)
class Place:
    """A device, or one of so many equal slices of it, or several devices as one: `cuda:0+cuda:1`."""

    device: str
    slices: int = 0  # 0: all of it
    number: int = 0  # which one, from 0

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.device.split("+"))

    @property
    def index(self) -> int:
        return number(self.device)


def number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


@dataclass(frozen=True)
class Placement:
    targets: tuple[Place, ...]
    drafter: Place


def places(text: str) -> list[Place]:
    """`cuda:1,cuda:2` are two places, `cuda:0/8` is eight, `cuda:1+cuda:2` is one."""
    found: list[Place] = []
    for part in text.split(","):
        if SEVERAL.fullmatch(part.strip()):
            found.append(Place(part.strip()))
            continue
        match = NAME.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"device {part.strip()!r}: must be cpu, cuda:0, cuda:0/8 for eight slices of it, or "
                "cuda:0+cuda:1 for one model over both"
            )
        device, slices = match[1].partition("/")[0], int(match[3] or 0)
        if match[3] is not None and slices < 2:
            raise ValueError(f"device {part.strip()!r}: must have at least 2 slices, or none")
        found += [Place(device, slices, i) for i in range(max(1, slices))]
    return found


def placement(targets: str, drafter: str | None, sp: int | None = None) -> Placement:
    """Without a device of its own, the drafter takes the last place; `sp` targets take the first ones."""
    found = places(targets)
    if drafter is None:
        if len(found) < 2:
            raise ValueError(f"target devices {targets!r}: has one place, and the drafter needs another")
        last = found.pop()
    else:
        [last] = _one(drafter)
    if sp is not None and sp < 1:
        raise ValueError(f"SP degree {sp}: must be at least 1")
    if sp is not None and sp > len(found):
        raise ValueError(f"SP degree {sp}: {targets!r} has room for {len(found)} targets")
    chosen = Placement(tuple(found[:sp]), last)
    _check_apart([*chosen.targets, last])
    return chosen


def _check_apart(found: Sequence[Place]) -> None:
    """No slice for two servers, and one way to cut a GPU: each cut begins with the same multiprocessors."""
    for device in sorted({device for place in found for device in place.devices}):
        cuts = sorted({place.slices for place in found if device in place.devices})
        if len(cuts) > 1:
            raise ValueError(f"{device}: is cut in {len(cuts)} ways, {cuts} slices, which would overlap")
    for place, count in Counter(found).items():
        if count > 1 and place.slices:
            raise ValueError(f"slice {place.number} of {place.device}: is given to two servers")


def _one(text: str) -> list[Place]:
    found = places(text)
    if len(found) > 1 and "," not in text:
        return found[-1:]  # of a GPU in slices, the last
    if len(found) != 1:
        raise ValueError(f"drafter device {text!r}: must be one place")
    return found


def check(chosen: Placement) -> None:
    """Refuse what this machine has not got."""
    import torch

    gpus = torch.cuda.device_count()
    for device in [each for place in (*chosen.targets, chosen.drafter) for each in place.devices]:
        if device != "cpu" and number(device) >= gpus:
            has = "there is no GPU here" if not gpus else f"there are {gpus} GPUs here, numbered from 0"
            raise ValueError(f"{device}: {has}; without --target-devices, the models run on the CPU")
