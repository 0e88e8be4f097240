"""The token after each row of logits, chosen on the device, so that a forward may follow without the host.

It is the likeliest, or at a temperature the winner of the exponential race by which tokens are sampled everywhere
(`noise.py`). Here the race is run in logarithms, which round otherwise: where the two best are nearly equal, only exact
arithmetic can say which has won, and the row is marked for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from struct import pack, unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.cuda.linear import launch_next, launch_options, wait_for_inputs
from dsi.sampling import logits as in_torch, noise

SPLITS, BLOCK, WARPS = 8, 4096, 8  # programs that share a row, and the tokens that one looks at together
# Between the logarithms of the two best: more than rounding. In float32 that begins with the logits: a winner is hardly
# ever more than 40 below the largest of them.
MARGIN = tl.constexpr(1e-5)
GOLDEN_GAMMA, MIX_1, MIX_2 = (tl.constexpr(number) for number in (noise.GOLDEN_GAMMA, noise.MIX_1, noise.MIX_2))
UNIT, HALF_UNIT = tl.constexpr(2.0**-52), tl.constexpr(2.0**-53)


def samples(sampling: Sampling) -> bool:
    """Whether these kernels support the settings."""
    plain = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p
    return sampling.temperature > 0 and sampling.rule == "match" and plain


@lru_cache(64)
def settings_of(sampling: Sampling) -> tuple[int, int]:
    """What the kernels read of the settings: what seeds the noise, and the bits of the temperature."""
    seed, temperature = unpack(
        "<qq", pack("<Qd", noise.splitmix64(sampling.seed & noise.UINT64_MAX), sampling.temperature)
    )
    return seed, temperature


def sample_tokens(logits: Tensor, settings: Tensor, tokens: Tensor, marked: Tensor) -> None:
    """Write the token after each row to `tokens`, and to `marked` the same, marked where the host has to decide.

    `settings` has the length of the text before the first row's token and what `settings_of` gives, or all that for
    each row.
    """
    rows, vocab = logits.shape
    step = settings.shape[-1] if settings.dim() > 1 else 0
    best = logits.new_empty(rows, SPLITS, 3, dtype=torch.float64)
    options = launch_options(logits.device)
    chunk = cdiv(vocab, SPLITS)
    _best_of_chunks[(rows, SPLITS)](
        logits, settings, best, vocab, chunk, STEP=step, BLOCK=BLOCK, num_warps=WARPS, **options
    )
    _best_of_rows[(rows,)](best, settings, tokens, marked, STEP=step, SPLITS=SPLITS, num_warps=1, **options)


def sample_texts(
    logits: Sequence[Tensor], samplings: Sequence[Sampling], positions: Sequence[Sequence[int]]
) -> list[Tokens]:
    """As `logits.sample_texts`, with two kernels for all rows whose settings they support."""
    sampled: list[Tokens] = [()] * len(logits)
    for sample, on_device in ((_sample_on_device, True), (in_torch.sample_texts, False)):
        if own := [i for i, sampling in enumerate(samplings) if samples(sampling) is on_device]:
            texts = sample([logits[i] for i in own], [samplings[i] for i in own], [positions[i] for i in own])
            for i, tokens in zip(own, texts):
                sampled[i] = tokens
    return sampled


def _sample_on_device(
    logits: Sequence[Tensor], samplings: Sequence[Sampling], positions: Sequence[Sequence[int]]
) -> list[Tokens]:
    rows = in_torch.concatenated(logits)
    wanted = [(sampling, position) for sampling, own in zip(samplings, positions) for position in own]
    settings = torch.tensor([(position - 1, *settings_of(sampling)) for sampling, position in wanted])
    tokens = torch.empty(2, len(rows), dtype=torch.int64, device=rows.device)
    with torch.cuda.device_of(rows):
        sample_tokens(rows, settings.to(rows.device), *tokens)
    sampled = tokens[1].tolist()
    for i, token in enumerate(sampled):
        if token < 0:  # marked
            [sampled[i]] = in_torch.sample_rows(rows[i : i + 1], *wanted[i])
    ends = list(accumulate(map(len, positions), initial=0))
    return [tuple(sampled[begin:end]) for begin, end in pairwise(ends)]


@triton.jit
def _mixed(x):
    """The finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _best_of_chunks(
    logits, settings, best, vocab, chunk, STEP: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """The best score of a part of a row, its token, and the next score; infinite where there is none to compare."""
    row, split = tl.program_id(0), tl.program_id(1)
    begin, end = split * chunk, tl.minimum(split * chunk + chunk, vocab)
    wait_for_inputs(OVERLAPS)
    launch_next(OVERLAPS)
    own = settings + row * STEP
    position = (tl.load(own) + (0 if STEP else row) + 1).to(tl.uint64)
    seed = tl.load(own + 1).to(tl.uint64, bitcast=True)
    temperature = tl.load(own + 2).to(tl.float64, bitcast=True)
    key = _mixed((seed ^ (position * GOLDEN_GAMMA)) + GOLDEN_GAMMA)
    first = tl.full((), -float("inf"), tl.float64)
    token, second = begin, first
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        place = logits + row.to(tl.int64) * vocab + tokens
        score = tl.load(place, tokens < end, -float("inf")).to(tl.float64)
        if temperature > 0:
            bits = _mixed(tokens.to(tl.uint64) * GOLDEN_GAMMA + key) >> 12
            uniform = bits.to(tl.float64) * UNIT + HALF_UNIT
            score = score / temperature - tl.log(-tl.log(uniform))
        numbers = tl.where(score == score, score, -float("inf"))
        largest, index = tl.max(numbers, 0, return_indices=True)
        next_largest = tl.max(tl.where(tokens == start + index, -float("inf"), numbers), 0)
        next_largest = tl.where(tl.max((score != score).to(tl.int32), 0) > 0, float("inf"), next_largest)
        second = tl.maximum(tl.maximum(second, next_largest), tl.minimum(first, largest))
        token = tl.where(largest > first, start + index, token)
        first = tl.maximum(first, largest)
    place = best + (row * tl.num_programs(1) + split) * 3
    tl.store(place, first)
    tl.store(place + 1, token.to(tl.float64))
    tl.store(place + 2, second)


@triton.jit
def _best_of_rows(best, settings, tokens, marked, STEP: tl.constexpr, SPLITS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Of all parts of a row, the first that has the best score."""
    row, split = tl.program_id(0), tl.arange(0, SPLITS)
    wait_for_inputs(OVERLAPS)
    launch_next(OVERLAPS)
    place = best + (row * SPLITS + split) * 3
    scores, second = tl.load(place), tl.load(place + 2)
    largest, index = tl.max(scores, 0, return_indices=True)
    second = tl.maximum(tl.max(second, 0), tl.max(tl.where(split == index, -float("inf"), scores), 0))
    token = tl.load(best + (row * SPLITS + index) * 3 + 1).to(tl.int64)
    sampled = tl.load(settings + row * STEP + 2).to(tl.float64, bitcast=True) > 0
    is_clear = (largest - second > MARGIN) & (largest < float("inf"))  # false where they are not numbers
    tl.store(tokens + row, token)
    tl.store(marked + row, tl.where(is_clear | (sampled == 0), token, -1 - token))
