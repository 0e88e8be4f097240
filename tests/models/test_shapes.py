import pytest
import torch

from dsi.models.shapes import SHAPES, config, random_model

BILLIONS = {
    "vicuna-13b": 13.0,
    "vicuna-7b": 6.74,
    "vicuna-68m": 0.068,
    "llama-1.1b": 1.1,
    "starcoder-15b": 15.5,
    "starcoder-168m": 0.164,
    "phi3-14b": 14.0,
    "phi3-4b": 3.8,
    "mistral-7b": 7.24,
    "qwen2-7b": 7.62,
    "qwen2-0.5b": 0.494,
    "qwen3-8b": 8.19,
}


@pytest.mark.parametrize("name", SHAPES)
def test_random_model_has_the_parameters_of_its_name(name: str) -> None:
    model = random_model(name, device="meta")
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.03)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_config_refuses_an_unknown_shape() -> None:
    with pytest.raises(ValueError, match=r"shape 'gpt-9': must be one of vicuna-13b, .*"):
        config("gpt-9")
