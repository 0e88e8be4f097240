"""What an engine makes of the generation configuration in a model's folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from command import dsi
from dsi.cli.engine import report_ignored_defaults
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.engine.generation_config import (
    ignored_fields,
    load_generation_config,
    process_logits,
    request_defaults,
)
from sample_tokenizers import llama, sample_tokenizer

PROMPT = "Once upon"
TEXT = {"repetition_penalty": 1.4, "suppress_tokens": [11, 12], "no_repeat_ngram_size": 2}


def save(folder: Path, **fields: Any) -> str:
    """A folder with a tiny model, its tokenizer and this generation configuration."""
    llama("characters").save_pretrained(folder)
    sample_tokenizer("characters").save_pretrained(folder)
    GenerationConfig(**fields).save_pretrained(folder)
    return str(folder)


def test_process_logits_has_what_depends_on_the_text_alone() -> None:
    model = llama("characters")
    assert process_logits(model) is None
    stored = model.generation_config
    try:
        model.generation_config = GenerationConfig(**TEXT, min_new_tokens=3, do_sample=True, temperature=0.5)
        process = process_logits(model)
    finally:
        model.generation_config = stored
    assert process is not None
    assert sorted(type(processor).__name__ for processor in process.processors) == [
        "NoRepeatNGramLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    ]


def test_ignored_fields_names_what_an_engine_does_not_honour() -> None:
    here, on_ray = EngineConfig(), EngineConfig(fleet="ray")
    stored = GenerationConfig(**TEXT, min_new_tokens=3, max_length=99, typical_p=0.5, num_beams=4)
    assert ignored_fields(stored, here, has_limit=True) == ["min_new_tokens", "num_beams"]
    assert ignored_fields(stored, here, has_limit=False) == ["max_length", "min_new_tokens", "num_beams"]
    stored.do_sample = True
    assert ignored_fields(stored, here, has_limit=True) == ["min_new_tokens", "num_beams", "typical_p"]
    assert set(ignored_fields(stored, on_ray, has_limit=True)) > set(TEXT)


def test_request_defaults_samples_only_if_the_configuration_does() -> None:
    assert request_defaults(GenerationConfig(temperature=0.5, max_new_tokens=7)) == {"max_new_tokens": 7}
    sampled = request_defaults(GenerationConfig(do_sample=True, temperature=0.5, min_p=0.1))
    assert sampled == {"temperature": 0.5, "top_k": 50, "top_p": 1.0, "min_p": 0.1}


def test_report_ignored_defaults_names_sampling_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `serve` and `compare` do, whose requests have defaults of their own."""
    folder = save(tmp_path, **TEXT, do_sample=True, min_new_tokens=3)
    report_ignored_defaults(EngineConfig(target=folder))
    names = "temperature, top_k, top_p, min_p, min_new_tokens"
    assert capsys.readouterr().err == f"dsi: {folder}: its generation_config is not honoured in {names}\n"


def test_load_generation_config_takes_the_models_if_there_is_none(tmp_path: Path) -> None:
    folder = save(tmp_path, **TEXT)
    assert load_generation_config(folder).repetition_penalty == 1.4
    (tmp_path / "generation_config.json").unlink()
    assert load_generation_config(folder).repetition_penalty is None


@pytest.mark.slow
def test_engine_writes_what_transformers_writes_with_the_folders_configuration(tmp_path: Path) -> None:
    folder, model, tokenizer = save(tmp_path, **TEXT), llama("characters"), sample_tokenizer("characters")
    ids = tokenizer(PROMPT, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    expected = model.generate(ids["input_ids"], attention_mask=torch.ones_like(ids["input_ids"]), **TEXT, **options)
    with Engine.load(target=folder, drafter=[folder, "ngram"], lookahead=3) as engine:
        for algorithm in ("nonsi", "si", "dsi"):
            done = engine.generate(PROMPT, max_new_tokens=24, algorithm=algorithm)
            assert (*done.prompt, *done.tokens) == tuple(expected[0].tolist())
        assert "corrected" not in engine.generate(PROMPT, max_new_tokens=24, algorithm="si").origins
        other = TEXT | {"repetition_penalty": 1.0}
        expected = model.generate(
            ids["input_ids"], attention_mask=torch.ones_like(ids["input_ids"]), **other, **options
        )
        done = engine.generate(PROMPT, max_new_tokens=24, repetition_penalty=1.0)
        assert (*done.prompt, *done.tokens) == tuple(expected[0].tolist())  # a request's own penalty takes precedence


@pytest.mark.slow
def test_generate_takes_options_left_out_from_the_folders_configuration(tmp_path: Path) -> None:
    sampled = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_new_tokens": 14}
    folder = save(tmp_path, **TEXT, **sampled, min_new_tokens=3)
    words = ["generate", PROMPT, "--target", folder, "--drafter", folder, "--seed", 5]
    done = dsi(*words)
    assert done.returncode == 0, done.stderr
    assert f"dsi: {folder}: its generation_config is not honoured in min_new_tokens" in done.stderr.splitlines()
    assert "14 tokens in" in done.stderr
    same = ["--temperature", 1.5, "--top-p", 0.95, "--top-k", 50, "--max-new-tokens", 14, "--algorithm", "nonsi"]
    assert dsi(*words, *same).stdout == done.stdout
    assert dsi(*words, "--temperature", 0).stdout != done.stdout
