"""Train the target on the corpus, then drafters distilled from it on the target's own writing.

Usage: python train.py build out --target-seconds 240 --drafter-seconds 120

Writes out/target-15m and out/drafter-1m as transformers folders (bfloat16 safetensors in files of at most
15 MB, with the tokenizer), and out/figures.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from prompts import PROMPTS
from sampler import DEVICE, Choose, Sampler, sampled
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
LENGTH = 320  # of what the target writes for its drafter
# Where its stories are taken up again, and at which temperature they are told on.
RETOLD = ((5, 0.0), (9, 0.0), (14, 0.7), (24, 0.0), (60, 0.0), (120, 0.0))
END, START = 0, 1
SHAPES = {
    "target-15m": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
    },
    "drafter-1m": {
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
    },
    "drafter-deep": {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
}


def build(name: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4096,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        rms_norm_eps=1e-5,
        **SHAPES[name],
    )
    return LlamaForCausalLM(config).to(DEVICE)


def optimise(model: LlamaForCausalLM, loss: Callable[[], Tensor], seconds: float, rate: float, title: str) -> float:
    """Steps for this long: the rate warms up, then falls to a fiftieth along a cosine."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    loss().backward()  # compiles
    optimiser.zero_grad(set_to_none=True)
    began, step, average, told = time.time(), 0, math.nan, time.time()
    while (share := (time.time() - began) / seconds) < 1:
        warm = min(1.0, step / 200)
        for group in optimiser.param_groups:
            group["lr"] = rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2)
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0:
            now = float(value.detach())
            average = now if math.isnan(average) else 0.9 * average + 0.1 * now
        if time.time() - told > 15:
            told = time.time()
            print(f"{title}: {told - began:.0f} s, step {step}, loss {average:.4f}", flush=True)
        step += 1
    print(f"{title}: {step} steps, loss {average:.4f}", flush=True)
    return average


def windows(data: Tensor, batch: int, length: int = CONTEXT + 1) -> Tensor:
    starts = torch.randint(0, len(data) - length, (batch, 1), device=data.device)
    return data[starts + torch.arange(length, device=data.device)].long()


def train_target(data: Tensor, seconds: float, batch: int) -> LlamaForCausalLM:
    model = build("target-15m")
    fast = torch.compile(model)

    def loss() -> Tensor:
        tokens = windows(data, batch)
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = fast(tokens[:, :-1]).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    optimise(model, loss, seconds, 3e-3, "target")
    return model


def stacked(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """A transformers Llama in the sampler's layout."""
    layers = model.model.layers

    def stack(pick: Callable[[torch.nn.Module], Tensor]) -> Tensor:
        return torch.stack([pick(layer).detach() for layer in layers]).bfloat16()

    return {
        "embedding": model.model.embed_tokens.weight.detach().bfloat16(),
        "norm1": stack(lambda layer: layer.input_layernorm.weight),
        "q": stack(lambda layer: layer.self_attn.q_proj.weight),
        "k": stack(lambda layer: layer.self_attn.k_proj.weight),
        "v": stack(lambda layer: layer.self_attn.v_proj.weight),
        "o": stack(lambda layer: layer.self_attn.o_proj.weight),
        "norm2": stack(lambda layer: layer.post_attention_layernorm.weight),
        "gate": stack(lambda layer: layer.mlp.gate_proj.weight),
        "down": stack(lambda layer: layer.mlp.down_proj.weight),
        "up": stack(lambda layer: layer.mlp.up_proj.weight),
        "norm": model.model.norm.weight.detach().bfloat16(),
    }


def own_writing(model: LlamaForCausalLM, batch: int, seconds: float) -> Tensor:
    """What the target writes itself: wild beginnings, told on to their end, then told anew from any place.

    Beginnings at temperature 2 are words that its stories rarely begin with, as a person's are.
    """
    writer = Sampler(stacked(model), model.config.num_attention_heads, False, batch, LENGTH)
    starts = torch.full((batch, 1), START, device=DEVICE)
    texts, began = [], time.time()
    while time.time() - began < seconds:
        wild = writer.write(starts, LENGTH, lambda logits, at: sampled(logits, 2.0 if at < 9 else 1.0, 0.002))
        texts.append(wild.to(torch.int16))
        for cut, temperature in RETOLD:
            texts.append(writer.write(wild[:, :cut], LENGTH, chosen_at(temperature)).to(torch.int16))
        print(
            f"own writing: {time.time() - began:.0f} s, {len(texts) * batch * LENGTH / 1e6:.0f}M tokens",
            flush=True,
        )
    return torch.cat(texts)


def chosen_at(temperature: float) -> Choose:
    if temperature == 0:
        return lambda logits, _: logits.argmax(-1)
    return lambda logits, _: sampled(logits, temperature, 0.0001)


def distil(name: str, target: LlamaForCausalLM, texts: Tensor, seconds: float, batch: int) -> LlamaForCausalLM:
    """Half the target's distribution, half its first choice: one serves sampling, the other greedy text."""
    model = build(name)
    fast, judge = torch.compile(model), torch.compile(target)

    def loss() -> Tensor:
        rows = texts[torch.randint(0, len(texts), (batch,), device=texts.device)].long()
        alive = (rows == END).cumsum(1) == 0  # after its end a story means nothing
        with torch.autocast(DEVICE, torch.bfloat16):
            with torch.no_grad():
                teacher = judge(rows).logits.float()
            student = fast(rows).logits.float().log_softmax(-1)
        whole = -(teacher.softmax(-1) * student).sum(-1)
        first = -student.gather(-1, teacher.argmax(-1, keepdim=True))[..., 0]
        return ((0.5 * whole + 0.5 * first) * alive).sum() / alive.sum()

    optimise(model, loss, seconds, 6e-3, name)
    return model


@torch.inference_mode()
def acceptance(target: LlamaForCausalLM, drafter: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """The share of the target's greedy tokens that the drafter would have guessed, after odd beginnings."""
    right = drawn = 0
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"].to(DEVICE)
        text = target.generate(tokens, do_sample=False, max_new_tokens=100)
        guesses = drafter(text).logits[0, tokens.shape[1] - 1 : -1].argmax(-1)
        right += int((guesses == text[0, tokens.shape[1] :]).sum())
        drawn += len(guesses)
    return right / drawn


@torch.inference_mode()
def surprise(model: LlamaForCausalLM, held_out: Tensor) -> float:
    rows = held_out[: len(held_out) // 513 * 513].view(-1, 513)[:256].long()
    logits = model(rows[:, :-1]).logits.float()
    return float(functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def save(model: LlamaForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="15MB")
    tokenizer.save_pretrained(folder)


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The weights as they will be shipped: rounded to bfloat16, computed with in float32."""
    return model.to(torch.bfloat16).float().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, help="a target already trained: only the drafters are made")
    parser.add_argument("--target-seconds", type=float, default=230)
    parser.add_argument("--writing-seconds", type=float, default=60)
    parser.add_argument("--drafter-seconds", type=float, default=240)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--writers", type=int, default=8192)
    parser.add_argument("--drafters", nargs="+", default=["drafter-1m"])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    source = options.target or options.build
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"),
        bos_token="<|start|>",
        eos_token="<|end|>",
        model_max_length=CONTEXT,
    )
    figures: dict[str, object] = {}
    if options.target:
        target = LlamaForCausalLM.from_pretrained(options.target).to(DEVICE)
    else:
        target = train_target(corpus(options.build / "train.npy"), options.target_seconds, options.batch)
        figures["target_surprise"] = surprise(rounded(target), corpus(options.build / "held_out.npy"))
        save(target, options.out / "target-15m", tokenizer)
    target = rounded(target)
    texts = own_writing(target, options.writers, options.writing_seconds)
    for name in options.drafters:
        drafter = rounded(distil(name, target, texts, options.drafter_seconds, options.batch))
        figures[name] = {"greedy_acceptance_odd_beginnings": acceptance(target, drafter, tokenizer)}
        print(name, figures[name], sum(p.numel() for p in drafter.parameters()), flush=True)
        save(drafter, options.out / name, tokenizer)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1))


def corpus(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path).astype(np.int16)).to(DEVICE)


if __name__ == "__main__":
    main()
