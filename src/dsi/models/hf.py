"""Any causal language model of transformers as a backend, with a prefix-sharing KV cache.

A forward keeps the cached prefix that the text shares with an earlier one, and computes the rest. It checks
its cancel flag before every layer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, lru_cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    modeling_gguf_pytorch_utils,
)
from transformers.cache_utils import Cache

from dsi.core.progress import Status, no_status
from dsi.core.tree_shape import END, Tree
from dsi.models.kv_sequence import KVSequence, common_prefix_length
from dsi.models.masked_rows import MaskedRows, TextRows
from dsi.models.names import check_exists, gguf_file, pretrained
from dsi.models.packed_attention import PackedLayer, attending_apart
from dsi.models.protocol import NEVER, CancelFlag, Cancelled, ForwardRequest
from dsi.models.tree_cache import TreeRows, tree_depth

MAX_OVERWRITE = 32  # cached tokens that a text may overwrite: recomputing so few costs little
# Types of layers in transformers' configurations that keep a state besides keys and values, or instead of them.
STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
MIN_PACKED_SEQUENCES = 32  # with fewer KV caches, texts that share forwards would take them from each other
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers whose masks are known
PROBE: Tree = ((END, 2), (END, 3), (0, 4), (1, 4))  # after tokens 0 and 1: whether siblings see each other


class Transformer:
    """A transformers model on one device, with KV caches for up to `max_sequences` texts."""

    def __init__(self, model: Any, max_sequences: int = 4) -> None:
        check_supported(model.config, f"a model of class {type(model).__name__}")
        self.model = model.eval()
        self.context = context_length(model.config)
        self._sequences: dict[KVSequence, None]  # the most recently used last
        self.clear_cache()
        self._max_sequences = max_sequences
        self.max_overwrite = MAX_OVERWRITE
        self.torch_threads = 0  # of each forward; 0: those that torch has
        self._cancelled: CancelFlag = NEVER
        self._hooks = [layer.register_forward_pre_hook(self._check_cancelled) for layer in decoder_layers(model)]

    def release(self) -> None:
        """Remove the hooks from the model, and free the KV caches."""
        for hook in self._hooks:
            hook.remove()
        self.clear_cache()

    def with_threads(self, threads: int, max_sequences: int) -> Transformer:
        """The same model with a number of threads and KV caches of its own; its hooks are this one's."""
        other = copy.copy(self)
        other._max_sequences, other.torch_threads, other._hooks = max_sequences, threads, []
        other.clear_cache()
        return other

    @property
    def kv_bytes(self) -> int:
        """The KV cache of one token."""
        return kv_bytes(self.model)

    def _use_threads(self) -> None:
        """Which torch counts for each thread of Python: the engine's may not be the one that loaded the model."""
        if self.torch_threads and torch.get_num_threads() != self.torch_threads:
            torch.set_num_threads(self.torch_threads)

    def clear_cache(self) -> None:
        self._sequences = {}
        self._sequence_of: dict[int, KVSequence] = {}  # by the identity of its owner

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag = NEVER) -> Any:
        self.check_text(tokens, start)
        self._use_threads()
        self._cancelled = cancelled
        sequence, num_cached = self._sequence(tokens, start)
        sequence.truncate(num_cached)
        new_tokens = list(tokens[num_cached:])
        if not new_tokens:
            return torch.empty((0, 0))
        logits = self._compute(sequence, new_tokens, len(tokens) + 1 - start)
        sequence.tokens += new_tokens
        return logits

    @property
    def can_pack(self) -> bool:
        """Whether texts can share a forward, and there are KV caches for so many that prompts are not read again."""
        return self._max_sequences >= MIN_PACKED_SEQUENCES and self.supports_trees

    def forward_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Any]:  # noqa: ARG002
        """The logits of each request in one forward, which only that of one request can cancel.

        What is cached of a text, or of the tree after it, is not computed again.
        """
        self._use_threads()
        self._cancelled = requests[0].cancelled if len(requests) == 1 else NEVER
        texts = self._text_rows(requests)
        logits = self._compute_texts(texts)
        record_rows(texts)
        return logits

    def _text_rows(self, requests: Sequence[ForwardRequest], in_use: Collection[KVSequence] = ()) -> list[TextRows]:
        """What is to be computed of each text, each with a sequence of its own, and none that is `in_use`."""
        texts, used = list[TextRows](), set(in_use)
        for request in requests:
            tokens, start = request.tokens, request.start
            self.check_text(tokens, start, tree_depth(request.tree) if request.asked else 0)
            sequence, num_cached = self._sequence(tokens, start, used)
            used.add(sequence)
            tree = TreeRows.of(sequence.nodes, request.tree, request.asked) if request.asked else None
            sequence.truncate(num_cached)
            num_positions = max(0, len(tokens) + 1 - start)
            texts.append(TextRows(sequence, num_cached, list(tokens[num_cached:]), num_positions, tree))
        return texts

    def _compute_texts(self, texts: list[TextRows]) -> list[Any]:
        """The logits of each: those of which something is cached share one forward."""
        logits: list[list[Any]] = [[] for _ in texts]
        shared: dict[int, TextRows] = {}
        for i, text in enumerate(texts):
            is_alone = len(texts) == 1 and text.tree is None
            if text.tokens and (is_alone or not text.sequence.cache.layers):  # which the first forward makes
                logits[i].append(self._compute(text.sequence, text.tokens, text.num_positions))
                text = TextRows(text.sequence, text.end, [], 0, text.tree)
            if text.row_tokens:
                shared[i] = text
        if shared:
            for i, rows in zip(shared, self._compute_masked(list(shared.values()))):
                logits[i].append(rows)
        return [rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.empty((0, 0)) for rows in logits]

    def _compute_masked(self, texts: list[TextRows]) -> Sequence[Any]:
        """Run one forward over the rows of all, each of which sees those of its own text; if it fails, undo it."""
        apart = len(texts) > 1 and self.attends_apart
        widths = [len(text.row_tokens) for text in texts]
        cache = texts[0].sequence.cache
        if len(texts) > 1:
            layers = zip(*(text.sequence.cache.layers for text in texts))
            cache = Cache(layers=[PackedLayer(own, widths, apart) for own in layers])
        trees = [text for text in texts if text.tree is not None]
        try:
            for text in trees:
                text.sequence.set_slots(torch.tensor(text.slots, device=self.model.device), len(text.key_positions))
            with torch.inference_mode(), attending_apart(self.model.config) if apart else nullcontext():
                logits = self._run_masked(cache, MaskedRows.of(texts)).float()
        except BaseException:
            for text in texts:
                text.sequence.truncate(len(text.sequence.tokens))
            raise
        finally:
            for text in trees:
                text.sequence.set_slots(None)
        for text in trees:
            for layer in text.sequence.cache.layers:
                layer.length = text.end
        return torch.split(logits, [text.num_logits for text in texts])

    def num_cached(self, tokens: Sequence[int]) -> int:
        """How many tokens a text that begins like this one has in the KV caches now."""
        return self._longest_prefix(tokens)[0]

    def check_text(self, tokens: Sequence[int], start: int, depth: int = 0) -> None:
        """Refuse a text, and a tree of this depth after it, that the model cannot compute."""
        if start < 1:
            raise ValueError("an empty text: a transformers model needs at least one token to begin with")
        if self.context and len(tokens) + depth > self.context:
            raise ValueError(f"a text of {len(tokens) + depth} tokens: the model's context is {self.context}")

    def _compute(self, sequence: KVSequence, new_tokens: list[int], num_positions: int) -> Any:
        """Run one forward over the new tokens; if it is cancelled, undo what some layers have cached."""
        length = len(sequence.tokens)
        ids = torch.tensor([new_tokens], device=self.model.device)
        try:
            with torch.inference_mode():
                logits = self.model(
                    input_ids=ids, past_key_values=sequence.cache, use_cache=True, logits_to_keep=max(num_positions, 1)
                ).logits[0]
        except BaseException:
            sequence.truncate(length)
            raise
        if {layer.length for layer in sequence.cache.layers} != {length + len(new_tokens)}:
            kind = self.model.config.model_type
            raise ValueError(f"a {kind} model keeps a state that cannot be cut back to an earlier token")
        return logits[logits.shape[0] - num_positions :].float()

    @cached_property
    def supports_trees(self) -> bool:
        """Whether a tree forward gives the logits of plain ones, as a small one shows: not all models take masks."""
        if not takes_masks(self.model):
            return False
        self._cancelled = NEVER
        try:
            tree = TreeRows.of({}, PROBE, (2, 3))
            [logits] = self._compute_texts([TextRows(KVSequence(), 0, [0, 1], 0, tree)])
            plain = torch.cat([self._compute(KVSequence(), [0, 1, sibling, 4], 1) for sibling in (2, 3)])
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        return self._are_close(logits, plain)

    @cached_property
    def attends_apart(self) -> bool:
        """Whether each text of a packed forward can attend to its own keys where they are, as a small one shows."""
        if getattr(self.model.config, "_attn_implementation", None) != "sdpa":
            return False
        self.attends_apart = True  # or the forward would ask
        texts = [(KVSequence(), [0, 1, 2, 3]), (KVSequence(), [1, 2, 3])]
        try:
            plain = torch.cat([self._compute(KVSequence(), tokens, 1) for _, tokens in texts])
            for sequence, tokens in texts:
                self._compute(sequence, tokens[:2], 0)
            packed = torch.cat([*self._compute_masked([TextRows(own, 2, tokens[2:], 1) for own, tokens in texts])])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        return self._are_close(packed, plain)

    def _are_close(self, logits: Tensor, plain: Tensor) -> bool:
        tolerance = float(plain.abs().max()) * (1e-4 if self.model.dtype == torch.float32 else 2e-2)
        return bool((logits - plain).abs().max() <= tolerance)

    def _run_masked(self, cache: Cache, rows: MaskedRows) -> Any:
        device, masks = self.model.device, self._masks(rows)
        return self.model(
            input_ids=torch.tensor([rows.tokens], device=device),
            position_ids=rows.positions[None].to(device),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(rows.wanted, dtype=torch.int64, device=device),
        ).logits[0]

    def _masks(self, rows: MaskedRows) -> dict[str, Tensor]:
        """An additive mask for each type of layer."""
        dtype, device, masks = self.model.dtype, self.model.device, {}
        for kind, window in attention_windows(self.model.config).items():
            hidden = ~rows.visible_in(window)[None, None].to(device)
            masks[kind] = torch.zeros(hidden.shape, dtype=dtype, device=device)
            masks[kind].masked_fill_(hidden, torch.finfo(dtype).min)
        return masks

    def _sequence(
        self, tokens: Sequence[int], start: int, in_use: Collection[KVSequence] = ()
    ) -> tuple[KVSequence, int]:
        """Return the KV sequence to use, and how many of its tokens: those before `start` - 1 at most.

        A text that would overwrite what is cached of another one forks off its own sequence.
        """
        shared, sequence = self._last_used(tokens) or self._longest_prefix(tokens)
        if sequence in in_use:  # by a text that has begun with the same tokens
            sequence = sequence.fork(shared)
        elif sequence.nodes and shared == len(sequence.tokens):
            sequence.accept(tokens)
            shared = len(sequence.tokens)
        if len(sequence.tokens) - shared > self._overwritable(sequence, tokens):
            sequence = sequence.fork(shared)
        if shared < len(sequence.tokens):
            sequence.nodes = {}  # which are after another text
        self._keep_sequence(sequence, tokens)
        return sequence, min(shared, start - 1)

    def _overwritable(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """How many cached tokens this text may overwrite: if they are another's, none where both can be cached.

        Texts that overwrite each other's are computed again and again. With few sequences, all of them taken, a fork
        would drop another text.
        """
        has_room = len(self._sequences) < self._max_sequences or self._max_sequences >= MIN_PACKED_SEQUENCES
        return 0 if has_room and sequence.owner is not tokens else self.max_overwrite

    def _keep_sequence(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """It is the most recently used now, and the one of this text."""
        self._sequences.pop(sequence, None)
        self._sequences[sequence] = None
        self._sequence_of.pop(id(sequence.owner), None)
        sequence.owner, self._sequence_of[id(tokens)] = tokens, sequence
        if len(self._sequences) > self._max_sequences:
            oldest = next(iter(self._sequences))
            del self._sequences[oldest]
            self._sequence_of.pop(id(oldest.owner), None)

    def _last_used(self, tokens: Sequence[int]) -> tuple[int, KVSequence] | None:
        """The sequence that this list of tokens had, if it still has most of them: with many texts, no search."""
        if (sequence := self._sequence_of.get(id(tokens))) is None:
            return None
        shared = common_prefix_length(sequence.tokens, tokens)
        return (shared, sequence) if shared and len(sequence.tokens) - shared <= self.max_overwrite else None

    def _longest_prefix(self, tokens: Sequence[int]) -> tuple[int, KVSequence]:
        """Return the sequence that shares the longest prefix, of several the shortest, then the last one used."""
        longest, best = 0, KVSequence()
        for sequence in reversed(self._sequences):
            shared = common_prefix_length(sequence.tokens, tokens)
            if shared > longest or (shared and shared == longest and len(sequence.tokens) < len(best.tokens)):
                longest, best = shared, sequence
        return longest, best

    def _check_cancelled(self, *_: Any) -> None:
        if self._cancelled.is_set():
            raise Cancelled


def record_rows(texts: Sequence[TextRows]) -> None:
    """Note what the KV caches of texts hold once a forward has run."""
    for text in texts:
        text.sequence.tokens += text.tokens
        text.sequence.nodes = {} if text.tree is None else text.tree.nodes


def takes_masks(model: Any) -> bool:
    """Whether the attention of a model takes any mask and any positions."""
    options = signature(type(model).forward).parameters
    own_mask = not getattr(model, "_supports_attention_backend", False) or not attention_windows(model.config)
    attention = getattr(model.config, "_attn_implementation", None)
    return not own_mask and attention in ("eager", "sdpa") and {"position_ids", "logits_to_keep"} <= options.keys()


def attention_windows(config: Any) -> dict[str, int]:
    """The sliding window of each type of layer, 0 where it sees all tokens; none at all if there are other types."""
    types = set(getattr(config, "layer_types", None) or ())
    window = (getattr(config, "sliding_window", None) or 0) if getattr(config, "use_sliding_window", True) else 0
    if not types:
        return {SLIDING if window else FULL: window}
    return {kind: window if kind == SLIDING else 0 for kind in types} if types <= {FULL, SLIDING} else {}


def is_of_transformers(model: Any) -> bool:
    """Whether a model has transformers' own class, and not somebody's that computes something else."""
    return type(model) is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)


def kv_bytes(model: Any) -> int:
    """The KV cache of one token, by the configuration."""
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * model.dtype.itemsize * config.num_hidden_layers * kv_heads * head_dim)


def sliding_window(config: Any, attention: Any) -> int:
    """The sliding window of a layer; 0 where it attends to all tokens."""
    if config.model_type in ("mistral", "phi3"):
        return config.sliding_window or 0
    return getattr(attention, "sliding_window", None) or 0


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers: the module list with as many entries as the configuration has layers."""
    num_layers = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    return nn.ModuleList()


def load_model(folder: str | Path, dtype: str = "float32", device: str = "cpu", status: Status = no_status) -> Any:
    """Load a model from a local folder or the Hugging Face hub, and report how many tensors have been read."""
    config = load_config(folder)
    check_supported(config, str(folder))
    try:
        with _tensors_reported(status):
            model = AutoModelForCausalLM.from_pretrained(
                **pretrained(folder), config=config, dtype=getattr(torch, dtype)
            )
    except Exception as error:
        raise ValueError(f"{folder}: cannot be loaded ({_first_line(error)})") from error
    return model.to(device)


@contextmanager
def _tensors_reported(status: Status) -> Iterator[None]:
    """Count what passes through transformers' progress bars while weights are read."""
    set_hook = getattr(transformers.logging, "set_tqdm_hook", None)  # newer than the oldest release we support
    if set_hook is None:
        yield
        return
    previous = set_hook(lambda bar, args, options: _counted(args[0], status) if args else bar(*args, **options))
    gguf_bar = modeling_gguf_pytorch_utils.tqdm  # which asks no hook
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: _counted(tensors, status)
    try:
        yield
    finally:
        set_hook(previous)
        modeling_gguf_pytorch_utils.tqdm = gguf_bar


def _counted(tensors: Collection[Any], status: Status) -> Iterator[Any]:
    for done, tensor in enumerate(tensors, 1):
        yield tensor
        status(f"{done} of {len(tensors)} tensors")


def load_config(folder: str | Path) -> Any:
    """Load the configuration of a model, without its weights."""
    check_exists(folder)
    try:
        if (file := gguf_file(folder)) is None:
            return AutoConfig.from_pretrained(folder)
        return copy.deepcopy(_read_gguf_config(file, file.stat().st_mtime_ns))
    except Exception as error:
        raise ValueError(f"{folder}: cannot be loaded ({_first_line(error)})") from error


@lru_cache(maxsize=8)
def _read_gguf_config(file: Path, _: int) -> Any:
    """The configuration of a GGUF file as of a time."""
    read_gguf_once()
    return AutoConfig.from_pretrained(**pretrained(file))


def read_tokenizer(folder: str | Path) -> Any:
    """Load transformers' tokenizer of a model; that of a GGUF file begins a text as the file says, if it does."""
    tokenizer = AutoTokenizer.from_pretrained(**pretrained(folder))
    if (file := gguf_file(folder)) is not None:
        reader = import_module("gguf").GGUFReader
        begins = reader(str(file)).fields.get("tokenizer.ggml.add_bos_token")
        if begins is not None:
            tokenizer.add_bos_token = bool(begins.contents())
        if hasattr(reader, "cache_clear"):  # the last that reads the file
            reader.cache_clear()
    return tokenizer


def read_gguf_once() -> None:
    """Keep what is read of a GGUF file: transformers reads it again for configuration, tokenizer and weights.

    With a large vocabulary that takes seconds each time.
    """
    with suppress(ImportError):
        gguf: Any = import_module("gguf")
        if not hasattr(gguf.GGUFReader, "cache_clear"):
            gguf.GGUFReader = lru_cache(maxsize=2)(gguf.GGUFReader)


def context_length(config: Any) -> int:
    """Return the context of a model in tokens; 0 is unlimited."""
    return max(0, int(getattr(config, "max_position_embeddings", 0) or 0))


def check_supported(config: Any, name: str) -> None:
    """Refuse, by its configuration, a model that cannot return to an earlier token after a rejection."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return  # which transformers refuses when it is loaded
    model_class, kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config.model_type
    layer_types = getattr(config, "layer_types", None) or ()
    if getattr(model_class, "_is_stateful", False) or STATE_LAYERS.intersection(layer_types):
        raise ValueError(f"{name}: {kind} models keep a state that cannot be cut back to an earlier token")
    if "past_key_values" not in signature(model_class.forward).parameters:
        raise ValueError(f"{name}: {kind} models have no KV cache that can be cut back to an earlier token")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
