"""GGUF files as targets and drafters: the text of the folder they were made from."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from dsi.engine.engine import Engine
from dsi.models.hf import load_config
from llama_cpp import convert, gguf_writer, save_weights

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def drafter_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in drafter as GGUF."""
    folder = tmp_path_factory.mktemp("gguf")
    model = Path(str(files("dsi"))) / "assets" / "builtin_pair" / "drafter"
    arrays, path = folder / "weights.npz", folder / "drafter.gguf"
    save_weights(str(model), str(arrays))
    convert(model, str(arrays), str(path), "float32")
    return path


def test_engine_writes_the_text_of_a_gguf_file(drafter_file: Path) -> None:
    small = str(files("dsi") / "assets" / "builtin_pair" / "drafter")
    with (
        Engine.load(target=str(drafter_file), drafter="ngram", algorithm="si") as engine,
        Engine.load(target=small, drafter="ngram", algorithm="nonsi") as plain,
    ):
        texts = [loaded.generate(PROMPT, max_new_tokens=40) for loaded in (engine, plain)]
    assert texts[0].text == texts[1].text
    assert texts[0].tokens == texts[1].tokens


def test_load_config_refuses_an_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf_writer(str(tmp_path / "other.gguf"), "mamba9")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"cannot be loaded .*architecture mamba9 is not supported"):
        load_config(tmp_path / "other.gguf")


def test_load_config_of_a_gguf_file_is_that_of_its_folder(drafter_file: Path) -> None:
    config = load_config(drafter_file)
    own = json.loads((files("dsi") / "assets" / "builtin_pair" / "drafter" / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert getattr(config, name) == own[name]
