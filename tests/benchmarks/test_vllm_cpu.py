"""The environment in which vLLM runs on CPUs."""

from vllm_cpu import needed

REQUIREMENTS = [
    "regex",
    "torch==2.13.0+cpu; platform_machine == 'x86_64'",
    "torchvision; platform_machine != 'riscv64'",
    "transformers<5.20.0,>=5.16.1",
    "fastapi[standard]<0.137.0,>=0.133.0",
    "ray; extra == 'ray'",
]


def test_needed_leaves_out_extras_and_what_would_bring_another_torch() -> None:
    names = ["regex", "transformers<5.20.0,>=5.16.1", "fastapi[standard]<0.137.0,>=0.133.0"]
    assert needed(REQUIREMENTS) == names
