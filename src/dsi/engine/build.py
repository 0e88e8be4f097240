"""From names of models to a running engine: load, place, measure, choose a lookahead."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from dsi.core.latency_table import LatencyTable
from dsi.core.messages import DRAFTER, TARGET
from dsi.engine.config import EngineConfig
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.processes import FORK, ProcessFleet
from dsi.fleets.ray_actors import RayFleet
from dsi.fleets.worker import Server
from dsi.models.child_process import die_with_parent
from dsi.models.hf import Transformer, load_model
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.names import NGRAM, model_path
from dsi.models.ngram import NGram
from dsi.models.protocol import ForwardRequest, Model, SamplingModel
from dsi.models.tensor_parallel import RankLost, TensorParallel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab import AUTO, SAME
from dsi.models.vocab.translate import SAMPLE_TEXT, translate_drafter
from dsi.models.vocab.vocabulary import Vocabulary
from dsi.planning.choose import Choice
from dsi.planning.equation_1 import suitable_lookahead
from dsi.planning.forecast import expected_ms, outlook
from dsi.planning.latency import LatencyModel, monotone
from dsi.planning.simulation import SimulationConfig

LOOKUP_SHARE = 0.05  # of a target's forward that looking a guess up is taken to cost, wire and all
TYPICAL_ACCEPTANCE = 0.8  # of the built-in pair; only a first guess for any other
REHEARSAL = 96  # tokens of virtual text by which a patience is chosen
PIECES = 8  # places within a forward where it can be stopped: a layer each, more or less
TEXTS = 4  # that a server keeps in its caches, unless more is asked for
WIDE = 8  # guesses by which a drafter is timed
WIDTHS = (1, 2, 4, 8, 16)  # new tokens of the forwards that are timed
REPEATS = 4  # of each: what else the machine does only adds


@dataclass(frozen=True)
class Deployment:
    """All that an engine needs to speak."""

    fleet: ProcessFleet | CudaFleet | RayFleet
    text: Tokenizer
    context: int
    sp: int
    latency: LatencyModel
    drafters: tuple[str, ...] = (DRAFTER,)  # their servers, the first one first
    choices: Mapping[str, Choice] = field(default_factory=dict)  # the best of each algorithm, if rehearsed
    remarks: tuple[str, ...] = ()  # what a user should know
    _patiences: dict[int, int] = field(default_factory=dict)  # the best for each lookahead

    def simulation(self, sp: int, tokens: int, **fields: Any) -> SimulationConfig:
        """These servers in virtual time."""
        return SimulationConfig(self.latency, TYPICAL_ACCEPTANCE, sp, tokens, eager=False, **fields)

    def lookahead(self, algorithm: str) -> int:
        if algorithm in self.choices:
            return self.choices[algorithm].lookahead
        target_ms, drafter_ms = self.latency.target_ms, self.latency.drafter_ms
        return suitable_lookahead(algorithm, target_ms, drafter_ms, TYPICAL_ACCEPTANCE, self.sp)

    @property
    def block(self) -> int:
        """For requests that share the targets: as many guesses as the drafter makes while each target is at
        its work, and no more than SI would take.
        """
        often = self.latency.target_ms / (self.sp * self.latency.drafter_ms)
        return max(1, min(self.lookahead("si"), int(often)))

    def patience(self, lookahead: int) -> int:
        """What is fastest in virtual time with the latencies of these models."""
        if choice := self._rehearsed(lookahead):
            return choice.patience
        if lookahead not in self._patiences:
            horizon, most = self.horizon(lookahead), self.lookahead("si")
            setting = self.simulation(self.sp, REHEARSAL, lookahead=lookahead, horizon=horizon)
            self._patiences[lookahead] = min(
                range(most + 1), key=lambda count: expected_ms(replace(setting, patience=count), "dsi")
            )
        return self._patiences[lookahead]

    def horizon(self, lookahead: int) -> int:
        """One block for each target and one more: further ahead, a drafter takes more than it gives."""
        choice = self._rehearsed(lookahead)
        return choice.horizon if choice else (self.sp + 1) * lookahead

    @cached_property
    def outlook(self) -> LatencyTable:
        """What a token takes by each way to go, for an engine that adapts."""
        return outlook(self.simulation(self.sp, REHEARSAL))

    def _rehearsed(self, lookahead: int) -> Choice | None:
        choice = self.choices.get("dsi")
        return choice if choice and choice.lookahead == lookahead else None


@dataclass(frozen=True)
class LocalModel:
    """One model in this process, as it would be on a server of its own."""

    backend: Transformer
    threads: int

    def fresh(self) -> SamplingModel:
        """The model with its server's threads and nothing read yet, so that no text helps the next."""
        torch.set_num_threads(self.threads)
        self.backend.clear_cache()
        return SamplingModel(self.backend)


@dataclass(frozen=True)
class ModelPair:
    """A target and a drafter that know nothing of each other: no fleet, no speculation."""

    target: LocalModel
    drafter: LocalModel
    text: Tokenizer
    context: int  # of the shorter one; 0: without bounds


def load_apart(target: str, drafter: str, dtype: str = "float32", threads: int | None = None) -> ModelPair:
    """Each as an engine with one target would place it, but in this process."""
    EngineConfig(target, (drafter,), dtype=dtype, threads=threads).check_measurable()
    quiet()
    big, small = load_model(model_path(target, TARGET), dtype), load_model(model_path(drafter, DRAFTER), dtype)
    text = tokenizer(model_path(target, TARGET), big)
    check_vocabulary(text, tokenizer(model_path(drafter, DRAFTER), small), target, drafter)
    cores = place([TARGET], [DRAFTER], sorted(os.sched_getaffinity(0)))
    slow, fast = (
        LocalModel(backend(model), threads or len(cores[role])) for model, role in ((big, TARGET), (small, DRAFTER))
    )
    context = min((each.backend.context for each in (slow, fast) if each.backend.context), default=0)
    return ModelPair(slow, fast, text, context)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter, and what is known of it before it starts."""

    model: Model
    ms: float | None = None  # for one guess; None: it has no forwards
    context: int = 0  # in the target's tokens; 0: without bounds


def load_pair(
    target: str,
    drafters: Sequence[str],
    sp: int,
    dtype: str = "float32",
    threads: int | None = None,
    vocab: str = AUTO,
    texts: int = TEXTS,
    mp: int = 1,
) -> Deployment:
    """A target and its drafters; `ngram` is one that needs no model. `texts` is how many of them each server
    keeps in its caches: as many as there are requests at once, or they are read again and again.

    `vocab` is how guesses reach the target: `same` tokens, by token (`tli`) or by text (`slem`) from a
    drafter with another vocabulary, or `auto`. `mp` is how many processes each target is split over. All
    this has been checked (`EngineConfig`).
    """
    quiet()
    torch.set_num_threads(1)  # before the first forward: a pool of threads does not survive a fork
    big = load_model(model_path(target, TARGET), dtype)
    text = tokenizer(model_path(target, TARGET), big)
    judge = backend(big, texts) if mp == 1 else TensorParallel(big, mp, texts, threads)
    guessers = [guesser(name, text, big, target, dtype, vocab, texts) for name in drafters]
    names = drafter_names(len(guessers))
    servers = [Server(f"{TARGET}-{i}", TARGET, SamplingModel(judge)) for i in range(1, sp + 1)]
    servers += [Server(name, name, each.model) for name, each in zip(names, guessers)]
    cores = place([f"{TARGET}-{i}" for i in range(1, sp + 1)], names, sorted(os.sched_getaffinity(0)))
    by_width = forwards_ms(judge, cores[servers[0].name])
    guess = next((each.ms for each in guessers if each.ms is not None), by_width[1] * LOOKUP_SHARE)
    latency = measured_latency(by_width, guess, crowding(sp, len(os.sched_getaffinity(0))))
    counts = {name: threads or max(1, len(own)) for name, own in cores.items()}
    fleet = ProcessFleet(
        servers,
        cores={} if threads else cores,
        prepare=lambda server: torch.set_num_threads(counts[server.name]),
    )
    bounds = [judge.context, *(each.context for each in guessers)]
    context = min((bound for bound in bounds if bound), default=0)
    return Deployment(fleet, text, context, sp, latency, names)


def measured_latency(by_width: Mapping[int, float], drafter_ms: float, contention: float = 0.0) -> LatencyModel:
    latency = LatencyModel.measured(by_width, drafter_ms, contention=contention, cancel_points=PIECES)
    return replace(latency, by_width=monotone(by_width))


def guesser(name: str, text: Tokenizer, big: Any, target: str, dtype: str, vocab: str, texts: int) -> LoadedDrafter:
    if name == NGRAM:
        return LoadedDrafter(NGram())  # it guesses from the target's own tokens, whatever they mean
    model = load_model(model_path(name, DRAFTER), dtype)
    own, small = tokenizer(model_path(name, DRAFTER), model), backend(model, texts)
    if vocab == SAME or (vocab == AUTO and text.same_vocabulary(own)):
        check_vocabulary(text, own, target, name)
        return LoadedDrafter(SamplingModel(small), forward_ms(small), small.context)
    known = [Vocabulary(each, rows(of)) for each, of in ((own, model), (text, big))]
    other = translate_drafter(vocab, small, known[0], known[1], small.context, name)
    return LoadedDrafter(other, guess_ms(other, known[1].encode(SAMPLE_TEXT)))


def rows(model: Any) -> int:
    """How many tokens a model knows, which need not be as many as its tokenizer does."""
    return int(model.get_input_embeddings().weight.shape[0])


def backend(model: Any, texts: int = TEXTS) -> Transformer:
    """The leanest way to run this model."""
    return LlamaCpu(model, texts) if LlamaCpu.supports(model) else Transformer(model, texts)


def place(targets: Sequence[str], drafters: Sequence[str], cores: Sequence[int]) -> dict[str, list[int]]:
    """The last core is the drafters'; the others go to the targets in turn."""
    if len(cores) == 1:
        return {name: list(cores) for name in (*targets, *drafters)}
    rest = cores[:-1]
    placed = {name: list(rest[i :: len(targets)]) or [rest[i % len(rest)]] for i, name in enumerate(targets)}
    return placed | {name: [cores[-1]] for name in drafters}


def tokenizer(name: str, model: Any) -> Tokenizer:
    try:
        found = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(f"{name}: has no tokenizer that can be loaded") from error
    ends = model.generation_config.eos_token_id
    return Tokenizer(found, endings(ends))


def endings(ends: int | list[int] | None) -> list[int]:
    """The tokens that end a text, however a model names them."""
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def drafter_names(count: int) -> tuple[str, ...]:
    """Of their servers, the first one first."""
    return tuple(DRAFTER if i == 1 else f"{DRAFTER}-{i}" for i in range(1, count + 1))


def check_vocabulary(target: Tokenizer, drafter: Tokenizer, *names: str) -> None:
    if not target.same_vocabulary(drafter):
        sizes = [len(text.tokenizer.get_vocab()) for text in (target, drafter)]
        raise ValueError(
            f"the drafter {names[1]} has another vocabulary ({sizes[1]} tokens) than the target {names[0]} "
            f"({sizes[0]} tokens)"
        )


def crowding(sp: int, cores: int) -> float:
    """By what share each target at work slows another, where there are not cores enough for all."""
    return max(0.0, sp / max(1, cores - 1) - 1) / (sp - 1) if sp > 1 else 0.0


def forwards_ms(judge: Transformer | TensorParallel, cores: Sequence[int]) -> dict[int, float]:
    """By the number of new tokens. A model that is split starts processes of its own, which must
    not be this one's: it is measured in one that ends, on the cores it will have.
    """
    if isinstance(judge, Transformer):
        return by_widths(judge)
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=tell_forwards_ms, args=(judge, cores, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = "they ended"
    finally:
        process.join()
        ours.close()
    if isinstance(found, str):
        raise ValueError(f"target mp {judge.size}: the processes do not work together ({found})")
    return found  # type: ignore[no-any-return]


def tell_forwards_ms(judge: TensorParallel, cores: Sequence[int], wire: Any) -> None:
    die_with_parent()
    if judge.threads is None:
        os.sched_setaffinity(0, cores)
    try:
        wire.send(by_widths(judge))
    except (RankLost, ValueError) as error:
        wire.send(str(error.__cause__ or error))
    judge.close()


def by_widths(model: Transformer | TensorParallel) -> dict[int, float]:
    widths = [width for width in WIDTHS if not model.context or 16 + width < model.context]
    return {width: forward_ms(model, width, REPEATS) for width in widths or [1]}


def forward_ms(model: Transformer | TensorParallel, new: int = 1, repeats: int = 8) -> float:
    """A forward over some new tokens: the places that are asked about are read anew each time."""
    tokens, times = [1] * (16 + new), []
    model.forward(tokens, len(tokens))
    for _ in range(repeats):
        began = time.perf_counter()
        model.forward(tokens, len(tokens) + 1 - new)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)  # what else the machine does only adds


def guess_ms(drafter: Model, tokens: Sequence[int], repeats: int = 4) -> float:
    """A guess among others, one after the other: what translating takes is in it."""
    text, times = list(tokens[:16]), []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(WIDE):
            text += drafter.answer(ForwardRequest(text, len(text)))
        times.append((time.perf_counter() - began) / WIDE)
    return 1000 * min(times)


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # or it reports each try to reach the hub
