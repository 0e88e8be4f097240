"""Names of models: the built-in pair, the paper's models, folders, GGUF files, and the hub."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

BUILTIN, NGRAM = "builtin", "ngram"
GGUF, GGUF_PACKAGES = ".gguf", ("gguf", "accelerate")  # by which transformers reads GGUF files
SPLIT_GGUF = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
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


def pretrained(path: str | Path) -> dict[str, str]:
    """The arguments by which transformers' `from_pretrained` finds a folder, a GGUF file or a name on the hub."""
    if (file := gguf_file(path)) is None:
        return {"pretrained_model_name_or_path": str(path)}
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file that a path names, or the only one of a folder without a configuration; None: there is none."""
    path = Path(path)
    if path.suffix == GGUF:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise ValueError(f"{path}: has {len(files)} GGUF files; name one of {', '.join(file.name for file in files)}")
    return files[0] if files else None


def weights_gb(path: str) -> float:
    """The size of the weights in a folder or GGUF file; 0 where there is none, as of a name on the hub."""
    if file := gguf_file(path):
        return file.stat().st_size / 1e9
    folder = Path(path)
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))  # transformers prefers the former
    return sum(file.stat().st_size for file in files) / 1e9


def check_exists(name: str | Path) -> None:
    """Refuse what is neither a folder, nor a GGUF file, nor a possible name on the hub."""
    if file := gguf_file(name):
        check_gguf(file)
    elif not Path(name).is_dir() and not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"{name}: there is no such model folder")


def check_gguf(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    if part := SPLIT_GGUF.search(file.name):
        raise ValueError(f"{file}: is one of {int(part[1])} parts; merge them into one GGUF file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{file}: is no GGUF file")
    if missing := [name for name in GGUF_PACKAGES if find_spec(name) is None]:
        raise ValueError(f"{file}: is read by {' and '.join(missing)}, not installed here: pip install 'dsi[gguf]'")
