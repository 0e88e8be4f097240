"""Names of models: the built-in pair, the paper's models, folders, and the hub."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

BUILTIN, NGRAM = "builtin", "ngram"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # a possible name on the hub
PAPER_MODELS = {  # the paper's names of models on the hub
    "vicuna-13b": "lmsys/vicuna-13b-v1.3",
    "vicuna-7b": "lmsys/vicuna-7b-v1.3",
    "vicuna-68m": "double7/vicuna-68m",
    "starcoder-15b": "bigcode/starcoder",
    "starcoder-168m": "bigcode/tiny_starcoder_py",
    "phi3-14b": "microsoft/Phi-3-medium-128k-instruct",
    "phi3-4b": "microsoft/Phi-3-mini-128k-instruct",
}


def full_name(name: str) -> str:
    """Resolve one of the paper's names, in any case, to the hub's; a folder of that name takes precedence."""
    return name if Path(name).is_dir() else PAPER_MODELS.get(name.lower(), name)


def model_path(name: str, role: str) -> str:
    """Return the folder or hub name of a model; `builtin` is the pair that comes with the package."""
    return str(files("dsi") / "assets" / "builtin_pair" / role) if name == BUILTIN else full_name(name)


def weights_gb(path: str) -> float:
    """The size of the weights in a folder; 0 where there is none, as of a name on the hub."""
    folder = Path(path)
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))  # transformers prefers the former
    return sum(file.stat().st_size for file in files) / 1e9


def check_exists(name: str | Path) -> None:
    """Refuse what is neither a folder nor a possible name on the hub."""
    if not Path(name).is_dir() and not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"{name}: there is no such model folder")
