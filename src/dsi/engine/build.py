"""Builds a deployment from an EngineConfig: on processes of this machine, CUDA devices, Ray, or over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.progress import Status, no_status
from dsi.engine.config import FLOAT32, INT8, EngineConfig
from dsi.engine.deployment import Deployment
from dsi.engine.profile_linear import kept_max_rows, use_kept_prefetching
from dsi.models.cpu.compiler import why_unavailable
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.cpu.huge_pages import move_to_huge_pages
from dsi.models.cpu.linear import quantize_int8
from dsi.models.cpu.transformer import CompiledTransformer
from dsi.models.endpoints.address import is_address
from dsi.models.hf import Transformer, check_supported, context_length, load_config, load_model, read_tokenizer
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.names import NGRAM, model_path, weights_gb
from dsi.models.protocol import Model
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab import AUTO, SAME
from dsi.models.vocab.vocabulary import Vocabulary

PARTING = "texts may part where two scores nearly tie"
MAX_NUM_SEQS = 4  # sequences that a server keeps in its KV cache by default


def build(config: EngineConfig, status: Status = no_status) -> Deployment:
    """Load the models and start the servers; `status` is told what is being done."""
    silence_transformers()
    if config.uses_endpoints:
        from dsi.engine.build_http import build_with_endpoints

        return build_with_endpoints(config, status)
    if config.fleet is not None:
        from dsi.engine.build_ray import build_on_ray

        return build_on_ray(config, status)
    check_models(config)
    if config.target_devices is not None:
        from dsi.engine.build_cuda import build_on_devices

        return build_on_devices(config, status)
    from dsi.engine.build_processes import build_on_processes

    return build_on_processes(config, status)


def check_models(config: EngineConfig) -> None:
    """Refuse models of an unsupported kind before the weights of any are loaded."""
    for name, role in named_models(config):
        check_supported(load_config(model_path(name, role)), name)


def named_models(config: EngineConfig) -> list[tuple[str, str]]:
    """The name and role of every model that has weights."""
    named = [(config.target, TARGET), *((name, DRAFTER) for name in config.drafter if name != NGRAM)]
    return [(name, role) for name, role in named if not is_address(name)]


@dataclass(frozen=True)
class ModelInfo:
    """What vocabularies are compared by, without the weights."""

    tokenizer: Tokenizer
    context: int  # 0: unlimited
    vocab_size: int  # of the embedding, which can differ from the tokenizer's

    @classmethod
    def of(cls, path: str, model: Any) -> ModelInfo:
        """Describe a loaded model."""
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        return cls(load_tokenizer(path, model), context_length(model.config), vocab_size)

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.vocab_size)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and what is known of it before its server starts."""

    model: Model
    context: int = 0  # in the target's tokens; 0: unlimited


def load_weights(name: str, role: str, dtype: str, status: Status = no_status) -> Any:
    """Load a model by its name, and report how far it has come."""
    path = model_path(name, role)
    gb = weights_gb(path)
    stage = f"loading {role} {name}{f', {gb:.1f} GB' if gb else ''}, {dtype}"
    status(stage)
    return load_for_cpu(path, dtype, lambda part: status(f"{stage}: {part}"))


def load_for_cpu(path: str, dtype: str, status: Status = no_status) -> Any:
    """Load a model to run it on the CPU, its weights in huge pages; int8 are quantized here, from bfloat16."""
    if dtype != INT8:
        return move_to_huge_pages(load_model(path, dtype, status=status))
    return move_to_huge_pages(quantize_int8(load_model(path, "bfloat16", status=status)))


def cpu_model(model: Any, max_num_seqs: int = MAX_NUM_SEQS) -> Transformer:
    """The fastest implementation on CPU that supports this model."""
    if CompiledDecoder.supports(model):
        use_kept_prefetching(model)
        return CompiledDecoder(model, max_num_seqs)
    if LlamaCpu.supports(model):
        return LlamaCpu(model, max_num_seqs)
    if CompiledTransformer.supports(model):
        return CompiledTransformer(model, max_num_seqs, kept_max_rows(model))
    return Transformer(model, max_num_seqs)


def cpu_warnings() -> tuple[str, ...]:
    """What makes forwards on this machine slower than they could be."""
    reason = why_unavailable()
    return (f"forwards on CPUs are not compiled, and take two to three times as long: {reason}",) if reason else ()


def check_exact(target: object, config: EngineConfig) -> tuple[str, ...]:
    """Refuse a target on the CPU that cannot be exact if it must be; otherwise warn, unless it is not wanted."""
    if isinstance(target, CompiledDecoder) or config.exact is False:
        return ()
    reason = f"{config.target}: its forwards here depend on how many tokens they compute"
    if config.exact:
        raise ValueError(f"exact: {reason}; leave it out ({PARTING})")
    return (f"{reason}; in {config.dtype} {PARTING}",) if config.dtype != FLOAT32 else ()


def running_limit(config: EngineConfig) -> int | None:
    """Requests at once whose KV caches each server keeps, and one to spare."""
    return None if config.max_num_seqs is None else max(1, config.max_num_seqs - 1)


def load_tokenizer(path: str, model: Any) -> Tokenizer:
    try:
        tokenizer = read_tokenizer(path)
    except Exception as error:
        raise ValueError(f"{path}: has no tokenizer that can be loaded") from error
    return Tokenizer(tokenizer, end_tokens(model.generation_config.eos_token_id))


def end_tokens(ids: int | list[int] | None) -> list[int]:
    """The tokens that end a text, in whichever form a configuration has them."""
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def drafter_names(count: int) -> tuple[str, ...]:
    """Names of the drafters' servers, the first one first."""
    return tuple(DRAFTER if i == 1 else f"{DRAFTER}-{i}" for i in range(1, count + 1))


def shortest_context(contexts: Iterable[int]) -> int:
    """The shortest context; 0, which is unlimited, only if all are."""
    return min((context for context in contexts if context), default=0)


def needs_translation(vocab: str, target: Tokenizer, drafter: Tokenizer, names: Sequence[str]) -> bool:
    """Whether draft tokens must be translated; raises if they must and `vocab` forbids it."""
    if vocab == SAME or (vocab == AUTO and target.same_vocabulary(drafter)):
        check_same_vocabulary(target, drafter, names)
        return False
    return True


def check_same_vocabulary(target: Tokenizer, drafter: Tokenizer, names: Sequence[str]) -> None:
    """Refuse a pair whose tokens differ; `names` are the target's and the drafter's."""
    if not target.same_vocabulary(drafter):
        sizes = [len(tokenizer.tokenizer.get_vocab()) for tokenizer in (target, drafter)]
        raise ValueError(
            f"the drafter {names[1]} has another vocabulary ({sizes[1]} tokens) than the target {names[0]} "
            f"({sizes[0]} tokens)"
        )


def silence_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # or it reports each try to reach the hub
