"""What models are called and by what means they may run, checked before anything is loaded.

To import what loads models takes seconds. A mistake should be told at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

BUILTIN, NGRAM = "builtin", "ngram"
RAY = "ray"
DTYPES = ("float32", "bfloat16")
SAME, BY_TOKEN, BY_TEXT, AUTO = "same", "tli", "slem", "auto"  # how guesses reach the target
WAYS = (SAME, BY_TOKEN, BY_TEXT, AUTO)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # what could be a name on the hub
PAPER_MODELS = {  # the paper's names for what it took from the hub
    "vicuna-13b": "lmsys/vicuna-13b-v1.3",
    "vicuna-7b": "lmsys/vicuna-7b-v1.3",
    "vicuna-68m": "double7/vicuna-68m",
    "starcoder-15b": "bigcode/starcoder",
    "starcoder-168m": "bigcode/tiny_starcoder_py",
    "phi3-14b": "microsoft/Phi-3-medium-128k-instruct",
    "phi3-4b": "microsoft/Phi-3-mini-128k-instruct",
}


def full_name(name: str) -> str:
    """The paper's names, in any case, are those of the hub; a folder of that name comes first."""
    return name if Path(name).is_dir() else PAPER_MODELS.get(name.lower(), name)


def folder(name: str, role: str) -> str:
    """`builtin` is the pair that comes with the package."""
    return str(files("dsi") / "assets" / "builtin_pair" / role) if name == BUILTIN else full_name(name)


def check_asked(
    target: str, drafters: Sequence[str], sp: int, mp: int, dtype: str, threads: int | None, vocab: str
) -> None:
    """What an engine is to be made of."""
    if sp < 1:
        raise ValueError(f"SP degree {sp}: must be at least 1")
    check_size(mp)
    check_means(dtype, threads)
    if vocab not in WAYS:
        raise ValueError(f"vocab {vocab!r}: must be {', '.join(WAYS[:-1])} or {WAYS[-1]}")
    for name in (target, *drafters):
        check_there(full_name(name))


def check_apart(target: str, drafter: str, dtype: str, threads: int | None) -> None:
    """What is to be measured alone."""
    check_means(dtype, threads)
    if NGRAM in (target, drafter):
        raise ValueError(f"{NGRAM}: is no model, so there are no forwards to measure")
    for name in (target, drafter):
        check_there(full_name(name))


def check_means(dtype: str, threads: int | None) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be {' or '.join(DTYPES)}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads {threads}: must be at least 1")


def check_size(mp: int) -> None:
    if mp < 1:
        raise ValueError(f"target mp {mp}: must be at least 1")


def check_there(name: str | Path) -> None:
    if not Path(name).is_dir() and not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"{name}: there is no such model folder")


def address_of(fleet: str) -> str | None:
    """`ray` starts a cluster here, `ray=ADDRESS` joins one."""
    kind, _, address = fleet.partition("=")
    if kind != RAY or (address == "" and "=" in fleet):
        raise ValueError(f"fleet {fleet!r}: must be ray, or ray=ADDRESS")
    return address or None
