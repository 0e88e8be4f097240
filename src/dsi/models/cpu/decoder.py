"""Decoder-only models of the Llama family in compiled kernels: whole layers in one call.

Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3: grouped queries, biases, norms of queries and keys, norms behind blocks,
sliding windows, soft caps and tied heads are read off the transformers model, whose weights are used in place. New
tokens of several texts can share one forward, which reads the weights once for all. A token's logits are the same to
the bit whatever the width of the forward, how the text was cut into forwards, what other texts share them, and the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsi.core.sequence import Tokens
from dsi.models.cpu.compiler import declare, kernel, why_unavailable
from dsi.models.cpu.linear import TYPES, CompiledLinear, Matrix, address
from dsi.models.hf import Transformer, is_of_transformers, record_rows, sliding_window
from dsi.models.kv_sequence import GROWTH, KVLayer, KVSequence
from dsi.models.masked_rows import TextRows
from dsi.models.protocol import NEVER, CancelFlag, Cancelled, ForwardRequest, StopFlag
from dsi.models.tree_cache import TreeRows

GEMMAS = ("gemma", "gemma2", "gemma3_text")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *GEMMAS)
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}  # as the kernels number them
DYNAMIC_ROPE = ("dynamic", "longrope")  # whose frequencies depend on the length of the text
MAX_ROWS = 256  # tokens of one call: longer prompts are read in parts, which bounds the scratch memory
IsCancelled = CFUNCTYPE(c_int32)
NEVER_CALLED = IsCancelled()
PROJECTIONS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


class LayerStruct(Structure):
    """`struct layer` of the kernels."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "attention_norm", "mlp_norm", "output_norm", "q_norm", "k_norm")),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("window", c_int64),
    )


class ModelStruct(Structure):
    """`struct model` of the kernels."""

    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        ("head", Matrix),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("embedding_stride", c_int64),
        *((name, c_int64) for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim")),
        ("rotary_dim", c_int64),
        *((name, c_float) for name in ("epsilon", "embedding_scale", "attention_scale")),
        *((name, c_float) for name in ("attention_softcap", "logit_softcap")),
        ("embedding_type", c_int32),
        ("activation", c_int32),
        ("scratch", c_void_p),
    )


class SequenceStruct(Structure):
    """`struct sequence` of the kernels."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "length", "capacity", "num_positions")),
        ("kv", c_void_p),
        *((name, c_int64) for name in ("num_nodes", "num_slots", "num_asked")),
        *((name, c_void_p) for name in ("nodes", "parents", "asked")),
    )


SEQUENCES = POINTER(ModelStruct), POINTER(SequenceStruct), c_int64
TOKENS = POINTER(ModelStruct), c_void_p, POINTER(SequenceStruct)
declare("scratch_size", c_int64, *SEQUENCES, c_int32)
declare("run_decoder", c_int32, *TOKENS, *[c_int64] * 2, c_void_p, c_int32, IsCancelled)
declare("generate", c_int64, *TOKENS, *[c_int64] * 2, *[c_void_p] * 3, c_int64, c_int32, IsCancelled, c_void_p)
declare("move_slots", None, c_void_p, *[c_int64] * 4, c_void_p, *[c_int64] * 2)


@dataclass(frozen=True, eq=False, slots=True)
class KVAddresses:
    """Where the keys and values of a sequence are, layer by layer."""

    first: Tensor  # the keys of the first and of the last layer, by which it is seen that buffers have grown
    last: Tensor
    pointers: Any
    capacity: int  # tokens that there is room for

    @classmethod
    def of(cls, layers: list[KVLayer]) -> KVAddresses:
        addresses = [tensor.data_ptr() for layer in layers for tensor in (layer.keys, layer.values)]
        first, last = layers[0].keys, layers[-1].keys
        return cls(first, last, (c_void_p * len(addresses))(*addresses), int(first.shape[-2]))

    def is_of(self, layers: list[KVLayer], length: int) -> bool:
        """Whether they are still those of these layers, with room for so many tokens."""
        return length <= self.capacity and self.first is layers[0].keys and self.last is layers[-1].keys

    def move(self, sources: list[int], first: int) -> None:
        _, heads, _, head_dim = self.first.shape
        slots, sizes = (c_int64 * len(sources))(*sources), (len(self.pointers), heads, self.capacity, head_dim)
        kernel("move_slots")(addressof(self.pointers), *sizes, addressof(slots), len(sources), first)


@dataclass(frozen=True, eq=False, slots=True)
class TreePart:
    """Nodes of a tree in a forward, as the kernels take them."""

    tokens: list[int]
    depth: int  # tokens of the longest path
    num_slots: int
    num_asked: int
    numbers: Any  # slots to compute, the parents of all slots, and what is asked about

    @classmethod
    def of(cls, rows: TreeRows) -> TreePart:
        numbers = [*rows.computed, *rows.parents, *rows.asked]
        array = (c_int64 * len(numbers))(*numbers)
        return cls(rows.tokens, max(rows.depths) + 1, len(rows.nodes), len(rows.asked), array)

    def fill(self, struct: SequenceStruct) -> None:
        struct.num_nodes, struct.num_slots, struct.num_asked = len(self.tokens), self.num_slots, self.num_asked
        struct.nodes = addressof(self.numbers)
        struct.parents = struct.nodes + sizeof(c_int64) * len(self.tokens)
        struct.asked = struct.parents + sizeof(c_int64) * self.num_slots


@dataclass(eq=False, slots=True)
class TextPart:
    """New tokens of one text in a forward, and for how many of the last ones logits are wanted."""

    sequence: KVSequence
    length: int  # tokens before them
    new_tokens: list[int]
    num_positions: int
    tree: TreePart | None = None  # behind them

    @classmethod
    def of(cls, text: TextRows) -> TextPart:
        return cls(*text[:4], None if text.tree is None else TreePart.of(text.tree))

    @property
    def tokens(self) -> list[int]:
        return self.new_tokens if self.tree is None else self.new_tokens + self.tree.tokens

    @property
    def num_rows(self) -> int:
        return len(self.new_tokens) if self.tree is None else len(self.new_tokens) + len(self.tree.tokens)

    @property
    def num_logits(self) -> int:
        return self.num_positions if self.tree is None else self.num_positions + self.tree.num_asked

    @property
    def end(self) -> int:
        """Tokens of the text up to here."""
        return self.length + len(self.new_tokens)

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache that it fills or sees."""
        return self.end if self.tree is None else self.end + self.tree.num_slots

    @property
    def longest(self) -> int:
        """Tokens of the longest text, with a path of the tree."""
        return self.end if self.tree is None else self.end + self.tree.depth

    def split(self) -> Iterator[TextPart]:
        """In parts that one forward can compute, one each: a part sees what those before it have cached."""
        if self.num_rows <= MAX_ROWS:
            yield self
            return
        rows, tree = len(self.new_tokens), self.tree
        for start in range(0, rows, MAX_ROWS):
            tokens = self.new_tokens[start : start + MAX_ROWS]
            wanted = max(0, min(len(tokens), start + len(tokens) + self.num_positions - rows))
            part = TextPart(self.sequence, self.length + start, tokens, wanted)
            if tree is not None and start + MAX_ROWS >= rows and len(tokens) + len(tree.tokens) <= MAX_ROWS:
                part.tree, tree = tree, None
            yield part
        if tree is not None:
            yield TextPart(self.sequence, self.end, [], 0, tree)


class RowAnswers(NamedTuple):
    """What a forward answers of its rows, and how the answers of several are joined."""

    of: Callable[[Tensor], Any]  # the logits of all rows
    join: Callable[[list[Any]], Any]


LOGITS = RowAnswers(lambda logits: logits, torch.cat)
LIKELIEST = RowAnswers(lambda logits: logits.numpy().argmax(-1)[:, None], np.concatenate)  # of equal ones the first


class CompiledDecoder(Transformer):
    """`CompiledDecoder.supports` says which models can run this way. Without `threads`, it has as many as torch."""

    supports_trees = can_pack = True
    max_picked = 1  # token after each row

    @staticmethod
    def supports(model: Any) -> bool:
        config = model.config
        if not is_of_transformers(model) or config.model_type not in MODEL_TYPES or why_unavailable():
            return False
        if activation(config) not in ACTIVATIONS or getattr(config, "use_bidirectional_attention", False):
            return False
        return not has_dynamic_rope(model) and has_plain_layers(model)

    def __init__(self, model: Any, max_sequences: int = 4, threads: int | None = None) -> None:
        super().__init__(model, max_sequences)
        self.release()  # from the hooks: the model's own layers do not run
        self._threads = threads
        config, attention = model.config, model.model.layers[0].self_attn
        self._tensors: list[Tensor] = []  # that the kernels hold the addresses of
        self._linears: list[CompiledLinear] = []  # likewise
        self._kv_shape = (1, config.num_key_value_heads, 0, attention.head_dim)
        self._layers = (LayerStruct * config.num_hidden_layers)(*map(self._layer, model.model.layers))
        embedding = model.model.embed_tokens
        rows = embedding.weight.detach().contiguous()
        self._vocab_size = len(rows)
        self._struct = ModelStruct(
            layers=self._layers,
            head=self._matrix(model.lm_head),
            norm=self._norm(model.model.norm),
            embedding=self._keep(rows),
            embedding_stride=rows.stride(0),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            epsilon=config.rms_norm_eps,
            embedding_scale=torch.tensor(getattr(embedding, "scalar_embed_scale", 1.0)).to(model.dtype),
            attention_scale=attention.scaling,
            attention_softcap=getattr(config, "attn_logit_softcapping", None) or 0,
            logit_softcap=getattr(config, "final_logit_softcapping", None) or 0,
            embedding_type=TYPES[rows.dtype],
            activation=ACTIVATIONS[activation(config)],
        )
        self._no_logits = floats(0, self._struct.head.out_features)
        self._callback = IsCancelled(lambda: self._cancelled.is_set())
        self._scratch: list[Tensor] = []  # that no forward uses
        self._lock = Lock()
        self._in_use: set[KVSequence] = set()  # by packed forwards that run
        self._positions = 0  # for which the rotary embedding is known
        self._rotary: list[dict[str, tuple[Tensor, Tensor]]] = []  # by type of layer; forwards that run use older ones

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is made anew from a copy of the model: addresses are those of one object."""
        return type(self), (self.model, self._max_sequences, self._threads)

    def with_threads(self, threads: int, max_sequences: int | None = None) -> CompiledDecoder:
        return CompiledDecoder(self.model, max_sequences or self._max_sequences, threads)

    @property
    def forwards_at_once(self) -> int:
        """Two of `forward_packed`, where a thread for each is its share: more threads compute one forward at a time."""
        return 2 if self._threads in (2, 3) else 1

    @property
    def kv_bytes(self) -> int:
        _, kv_heads, _, head_dim = self._kv_shape
        return int(2 * torch.float32.itemsize * len(self._layers) * kv_heads * head_dim)

    def _layer(self, layer: Any) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        behind = hasattr(layer, "pre_feedforward_layernorm")  # Gemma 2 and 3 have norms behind blocks, too
        return LayerStruct(
            *(self._matrix(getattr(attention, name)) for name in PROJECTIONS[0][1]),
            *(self._matrix(getattr(mlp, name)) for name in PROJECTIONS[1][1]),
            input_norm=self._norm(layer.input_layernorm),
            attention_norm=self._norm(layer.post_attention_layernorm) if behind else None,
            mlp_norm=self._norm(layer.pre_feedforward_layernorm if behind else layer.post_attention_layernorm),
            output_norm=self._norm(layer.post_feedforward_layernorm) if behind else None,
            q_norm=self._norm(getattr(attention, "q_norm", None)),
            k_norm=self._norm(getattr(attention, "k_norm", None)),
            window=sliding_window(self.model.config, attention),
        )

    def _matrix(self, linear: Any) -> Matrix:
        self._linears.append(CompiledLinear(linear))
        return self._linears[-1].matrix

    def _norm(self, norm: Any) -> int | None:
        if norm is None:
            return None
        weight = norm.weight.detach().float()
        return self._keep(1 + weight if self.model.config.model_type in GEMMAS else weight)

    def _keep(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.contiguous())
        return self._tensors[-1].data_ptr()

    def forward_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Tensor]:
        """As any transformers model does, all in one forward if they are not too many, on its share of the threads."""
        return self._packed(requests, LOGITS, at_once)

    def pick_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[np.ndarray]:
        """The likeliest token after each row of `forward_packed`, in a column: dividing logits by text takes longer."""
        return self._packed(requests, LIKELIEST, at_once)

    def _packed(self, requests: Sequence[ForwardRequest], answer: RowAnswers, at_once: int) -> list[Any]:
        self._cancelled = requests[0].cancelled if len(requests) == at_once == 1 else NEVER
        with self._lock:
            texts = self._text_rows(requests, self._in_use)
            parts = [TextPart.of(text) for text in texts]
            sequences = {part.sequence for part in parts}
            self._reserve_all(parts)
            self._reserve_rotary(max((part.longest for part in parts), default=0))
            self._in_use |= sequences
        try:
            answers = self._compute_parts(parts, answer, at_once)
            record_rows(texts)
        finally:
            with self._lock:
                self._in_use -= sequences
        return answers

    def num_cached(self, tokens: Sequence[int]) -> int:
        with self._lock:  # another thread may take a sequence
            return super().num_cached(tokens)

    def _compute(self, sequence: KVSequence, new_tokens: list[int], num_positions: int) -> Any:
        parts = [TextPart(sequence, len(sequence.tokens), new_tokens, num_positions)]
        self._reserve_all(parts)
        return self._compute_parts(parts)[0]

    def generate(self, tokens: Sequence[int], count: int, cancelled: CancelFlag = NEVER) -> list[int]:
        """The likeliest token after a text, and so on: so many, without coming back to Python between them."""
        self.check_text(tokens, len(tokens), count - 1)
        self._cancelled = cancelled
        sequence, num_cached = self._sequence(tokens, len(tokens))
        sequence.truncate(num_cached)
        if len(tokens) - num_cached > MAX_ROWS:
            prompt = list(tokens[num_cached:-1])
            self._compute(sequence, prompt, 0)
            sequence.tokens += prompt
        part = TextPart(sequence, len(sequence.tokens), list(tokens[len(sequence.tokens) :]), 1)
        [generated] = self._generate([part], [count], self._num_threads)
        if len(generated) < count:
            raise Cancelled
        return generated

    def generate_packed(
        self, requests: Sequence[ForwardRequest], counts: Sequence[int], at_once: int, stop: StopFlag
    ) -> list[Tokens] | None:
        """So many of the likeliest tokens of each text, in one call; None where their new tokens are too many for it.

        Fewer, but at least one, where it is to stop.
        """
        self._cancelled = NEVER
        for request, count in zip(requests, counts):
            self.check_text(request.tokens, request.start, count - 1)
        with self._lock:
            texts = self._text_rows(requests, self._in_use)
            parts, sequences = [TextPart.of(text) for text in texts], {text.sequence for text in texts}
            if sum(part.num_rows for part in parts) > MAX_ROWS:
                return None
            self._reserve_generated(parts, counts)
            self._in_use |= sequences
        try:
            return list(map(tuple, self._generate(parts, counts, max(1, self._num_threads // at_once), stop)))
        finally:
            with self._lock:
                self._in_use -= sequences

    def _reserve_generated(self, parts: Sequence[TextPart], counts: Sequence[int]) -> None:
        """Make room for all tokens but the last of each text."""
        longest = [part.end + count - 1 for part, count in zip(parts, counts)]
        self._reserve_rotary(max(longest))
        for part, length in zip(parts, longest):
            self._reserve(part.sequence, length)

    def _generate(
        self, parts: Sequence[TextPart], counts: Sequence[int], threads: int, stop: StopFlag | None = None
    ) -> list[list[int]]:
        tokens, most, number = [token for part in parts for token in part.tokens], max(counts), len(parts)
        self._check_tokens(tokens)
        self._reserve_generated(parts, counts)
        structs, widest = (SequenceStruct * number)(*map(self._sequence_struct, parts)), (SequenceStruct * number)()
        for wide, struct, count in zip(widest, structs, counts):
            wide.rows, wide.length, wide.num_positions = struct.rows, struct.length + count - 1, 1
        ids, generated = (c_int64 * len(tokens))(*tokens), (c_int64 * (most * number))()
        counted, logits = (c_int64 * number)(*counts), floats(number, self._struct.head.out_features)
        with self._scratch_for(widest, threads) as model:
            results = logits.data_ptr(), addressof(generated), addressof(counted)
            arguments = addressof(ids), structs, number, len(self._layers), *results, most, threads, self._is_cancelled
            num_steps = kernel("generate")(model, *arguments, None if stop is None else addressof(stop.number))
        answers = [generated[i * most : i * most + min(count, num_steps)] for i, count in enumerate(counts)]
        for part, answer in zip(parts, answers):
            if answer:
                self._record_generated(part, answer)
        return answers

    @staticmethod
    def _record_generated(part: TextPart, generated: list[int]) -> None:
        """All but the last token are cached."""
        sequence, end = part.sequence, part.end + len(generated) - 1
        for kv_layer in sequence.cache.layers:
            kv_layer.length = end
        sequence.tokens += part.new_tokens + generated[:-1]
        sequence.nodes = {}

    def _compute_texts(self, texts: list[TextRows]) -> list[Tensor]:
        parts = [TextPart.of(text) for text in texts]
        self._reserve_all(parts)
        return self._compute_parts(parts)

    def _reserve_all(self, parts: Sequence[TextPart]) -> None:
        """Make room for all of their tokens, or what a first forward caches would not be copied."""
        for part in parts:
            self._reserve(part.sequence, part.num_slots)

    def _compute_parts(self, parts: list[TextPart], answer: RowAnswers = LOGITS, at_once: int = 1) -> list[Any]:
        """Lengths change once all layers have run: a cancelled forward leaves nothing."""
        answers: dict[int, list[Any]] = {}
        for forward in self._forwards(parts):
            for part, rows in zip(forward, self._run(forward, answer, at_once)):
                answers.setdefault(id(part.sequence), []).append(rows)
        for part in parts:
            end = part.end
            for kv_layer in part.sequence.cache.layers:
                kv_layer.length = end
        rows_of = [answers.get(id(part.sequence)) or [answer.of(self._no_logits)] for part in parts]
        return [rows[0] if len(rows) == 1 else answer.join(rows) for rows in rows_of]

    def _forwards(self, parts: list[TextPart]) -> Iterator[list[TextPart]]:
        """Pack the new tokens of all texts into forwards, each text in its order."""
        forward: list[TextPart] = []
        rows = 0
        for whole in parts:
            for part in whole.split():
                width = part.num_rows
                if forward and rows + width > MAX_ROWS:
                    yield forward
                    forward, rows = [], 0
                if width:
                    forward.append(part)
                    rows += width
        if forward:
            yield forward

    def _run(self, parts: list[TextPart], answer: RowAnswers = LOGITS, at_once: int = 1) -> Sequence[Any]:
        """Run one forward; return the answers of each part."""
        threads, tokens = max(1, self._num_threads // at_once), parts[0].tokens
        if len(parts) > 1:
            tokens = [token for part in parts for token in part.tokens]
        self._check_tokens(tokens)
        self._reserve_rotary(max(part.longest for part in parts))
        structs = (SequenceStruct * len(parts))(*map(self._sequence_struct, parts))
        ids, counts = (c_int64 * len(tokens))(*tokens), [part.num_logits for part in parts]
        logits = floats(sum(counts), self._struct.head.out_features)
        with self._scratch_for(structs, threads) as model:
            sizes = len(parts), len(self._layers), logits.data_ptr(), threads
            if kernel("run_decoder")(model, addressof(ids), structs, *sizes, self._is_cancelled):
                raise Cancelled
        answers = answer.of(logits)
        if len(parts) == 1:
            return [answers]
        return [answers[end - count : end] for count, end in zip(counts, accumulate(counts))]

    @property
    def _num_threads(self) -> int:
        return self._threads or torch.get_num_threads()

    @property
    def _is_cancelled(self) -> Any:
        return NEVER_CALLED if self._cancelled is NEVER else self._callback

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)}: must be below {self._vocab_size}")

    def _sequence_struct(self, part: TextPart) -> SequenceStruct:
        addresses = self._reserve(part.sequence, part.num_slots)
        kv = addressof(addresses.pointers)
        struct = SequenceStruct(len(part.new_tokens), part.length, addresses.capacity, part.num_positions, kv)
        if part.tree is not None:
            part.tree.fill(struct)
        return struct

    def _reserve(self, sequence: KVSequence, length: int) -> KVAddresses:
        """Make room for so many tokens in the KV cache of a sequence."""
        layers, addresses = sequence.cache.layers, sequence.addresses
        if layers and isinstance(addresses, KVAddresses) and addresses.is_of(layers, length):
            return addresses
        while len(layers) < len(self._layers):
            layers.append(KVLayer())
        for layer in layers:
            layer.reserve(length, self._kv_shape)
        sequence.addresses = addresses = KVAddresses.of(layers)
        return addresses

    @contextmanager
    def _scratch_for(self, structs: Any, threads: int) -> Iterator[Any]:
        """The model with memory for one forward, as large as it needs."""
        size = kernel("scratch_size")(byref(self._struct), structs, len(structs), threads)
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = floats(size)
        if len(scratch) < size:
            scratch = floats(size)
        struct = ModelStruct.from_buffer_copy(self._struct)
        struct.scratch = scratch.data_ptr()
        try:
            yield byref(struct)
        finally:
            self._scratch.append(scratch)

    def _reserve_rotary(self, length: int) -> None:
        """Compute the rotary embedding of all positions below `length`, and some more."""
        if length <= self._positions:
            return
        positions = min(self.context or length + GROWTH, max(2 * length, 1024))
        types = getattr(self.model.config, "layer_types", None) or ["full_attention"] * len(self._layers)
        tables = {name: rotary_embedding(self.model, positions, name) for name in set(types)}
        for layer, name in zip(self._layers, types):
            layer.cos, layer.sin = map(address, tables[name])
        self._struct.rotary_dim = tables[types[0]][0].shape[1]
        self._rotary.append(tables)
        self._positions = positions


def rotary_embedding(model: Any, positions: int, layer_type: str) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a model's rotary embedding, in float32; Gemma 3 has another for each type of layer."""
    rotary = model.model.rotary_emb
    arguments: tuple[Any, ...] = (floats(0), torch.arange(positions)[None])
    if "layer_type" in signature(rotary.forward).parameters:
        arguments = *arguments, layer_type
    with torch.inference_mode():
        cos, sin = rotary(*arguments)
    return cos[0].contiguous(), sin[0].contiguous()


def floats(*shape: int) -> Tensor:
    """Memory for the kernels, whatever torch's default is."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def has_plain_layers(model: Any) -> bool:
    """Whether all linear layers can be compiled and have one number format and the configuration's sizes."""
    config, layers = model.config, list(linear_layers(model))
    if len(model.model.layers) != config.num_hidden_layers or not all(map(CompiledLinear.supports, layers)):
        return False
    head_dim = model.model.layers[0].self_attn.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = [queries, keys, keys, hidden, inner, inner, hidden] * config.num_hidden_layers
    one_format = len({layer.weight.dtype for layer in layers}) == 1
    return one_format and [layer.out_features for layer in layers[:-1]] == sizes


def linear_layers(model: Any) -> Iterator[Any]:
    for layer in model.model.layers:
        for block, names in PROJECTIONS:
            yield from (getattr(getattr(layer, block), name) for name in names)
    yield model.lm_head


def activation(config: Any) -> str:
    """The name of the activation; Gemma's configuration has it in a field of its own."""
    own = getattr(config, "hidden_activation", None) if config.model_type in GEMMAS else None
    return str(own or config.hidden_act)


def has_dynamic_rope(model: Any) -> bool:
    kinds = model.model.rotary_emb.rope_type
    return any(kind in DYNAMIC_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
