"""Compiled kernels for forwards of few tokens on a CPU, at the speed of its memory; they need numba.

Every product accumulates in the same order whatever the number of rows beside it, so a token's logits do not depend on
how many tokens a forward computes. Weights are float32, bfloat16 (as unsigned 16-bit integers) or int8 with
a scale for each output; activations are float32.
"""

# ruff: noqa: ARG001 - an intrinsic's arguments are types, and their values come to the function it returns

# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg, var-annotated"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

LANES = 16 if get_host_cpu_features().get("avx512f") else 8  # floats of a register
FLOAT, INT32, INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, INT_VECTOR = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
MAX_ROWS, COLUMNS = 4, 12  # that one pass over the weights computes

Builder = Any


def index(value: int) -> ir.Constant:
    return ir.Constant(INDEX, value)


def splat(builder: Builder, value: Any) -> Any:
    """A vector with one value in every lane."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(INT32, 0))
    zeros = ir.Constant(INT_VECTOR, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(VECTOR, ir.Undefined), zeros)


def constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def call(builder: Builder, name: str, *args: Any) -> Any:
    """Call an intrinsic of LLVM on vectors."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{LANES}f32"), args)


def row_pointer(builder: Builder, array: Any, row: Any) -> Any:
    """The first element of a row; rows may be strided, elements may not."""
    bytes_ = builder.bitcast(array.data, ir.IntType(8).as_pointer())
    offset = builder.mul(row, builder.extract_value(array.strides, 0))
    return builder.bitcast(builder.gep(bytes_, [offset]), array.data.type)


def load(builder: Builder, pointer: Any, at: Any) -> Any:
    """Load a vector as floats: from float32, from the bits of bfloat16, or from int8."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, LANES)
    value = builder.load(builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer()), align=element_bytes(element))
    if element == FLOAT:
        return value
    if element.width == 16:
        bits = builder.shl(builder.zext(value, INT_VECTOR), ir.Constant(INT_VECTOR, [16] * LANES))
        return builder.bitcast(bits, VECTOR)
    return builder.sitofp(builder.sext(value, INT_VECTOR), VECTOR)


def element_bytes(element: Any) -> int:
    return 4 if element == FLOAT else element.width // 8


def store(builder: Builder, value: Any, pointer: Any, at: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(pointer, [at]), VECTOR.as_pointer()), align=4)


def loop(
    builder: Builder,
    start: Any,
    end: Any,
    step: int,
    initial: Sequence[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Run `body(i, values) -> values` for each i; return the values after the last."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(INDEX)
    i.add_incoming(start, before)
    values = [builder.phi(value.type) for value in initial]
    for value, first in zip(values, initial):
        value.add_incoming(first, before)
    builder.cbranch(builder.icmp_signed("<", i, end), inside, after)
    builder.position_at_end(inside)
    changed = body(i, list(values))
    i.add_incoming(builder.add(i, index(step)), builder.block)
    for value, new in zip(values, changed):
        value.add_incoming(new, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return list(values)


def horizontal_sum(builder: Builder, vector: Any) -> Any:
    """Add the lanes pairwise, always in the same order."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        halves = [ir.Constant(ir.VectorType(INT32, lanes), [*range(i, i + lanes)]) for i in (0, lanes)]
        low, high = (builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), half) for half in halves)
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(INT32, 0))


def horizontal_max(builder: Builder, vector: Any) -> Any:
    lanes = [builder.extract_element(vector, ir.Constant(INT32, lane)) for lane in range(LANES)]
    largest = lanes[0]
    for lane in lanes[1:]:
        largest = builder.select(builder.fcmp_ordered(">", lane, largest), lane, largest)
    return largest


def exp(builder: Builder, x: Any) -> Any:
    """exp in float32 to about one unit in the last place, for x below 88 (Cephes' polynomial)."""
    x = call(builder, "maxnum", x, constant(-87.0))
    n = call(builder, "floor", call(builder, "fma", x, constant(1.44269504088896341), constant(0.5)))
    x = call(builder, "fma", n, constant(-0.693359375), x)
    x = call(builder, "fma", n, constant(2.12194440e-4), x)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = call(builder, "fma", y, x, constant(coefficient))
    y = call(builder, "fma", y, builder.fmul(x, x), builder.fadd(x, constant(1.0)))
    exponent = builder.add(builder.fptosi(n, INT_VECTOR), ir.Constant(INT_VECTOR, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(INT_VECTOR, [23] * LANES)), VECTOR)
    return builder.fmul(y, power)


def array_of(context: Any, builder: Builder, type_: Any, value: Any) -> Any:
    return context.make_array(type_)(context, builder, value)


@intrinsic(prefer_literal=True)
def tile(_: Any, w: Any, n: Any, scale: Any, x: Any, r: Any, y: Any, add: Any, rows: Any, columns: Any) -> Any:
    """y[r + i, n + j] = x[r + i] . w[n + j] for each i < rows, j < columns; with `add`, added to what is there."""
    num_rows, num_columns = rows.literal_value, columns.literal_value
    scaled = w.dtype == types.int8

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        w_, n_, scale_, x_, r_, y_, add_ = args[:7]
        weights, scales, inputs, outputs = (
            array_of(context, builder, signature.args[i], value)
            for i, value in ((0, w_), (2, scale_), (3, x_), (5, y_))
        )
        ws = [row_pointer(builder, weights, builder.add(n_, index(j))) for j in range(num_columns)]
        xs = [row_pointer(builder, inputs, builder.add(r_, index(i))) for i in range(num_rows)]

        def body(k: Any, sums: list[Any]) -> list[Any]:
            w_vectors = [load(builder, pointer, k) for pointer in ws]
            added = []
            for i, pointer in enumerate(xs):
                x_vector = load(builder, pointer, k)
                added += [
                    call(builder, "fma", w_vectors[j], x_vector, sums[i * num_columns + j]) for j in range(num_columns)
                ]
            return added

        length = builder.extract_value(weights.shape, 1)
        sums = loop(builder, index(0), length, LANES, [constant(0.0)] * (num_rows * num_columns), body)
        for i in range(num_rows):
            out = row_pointer(builder, outputs, builder.add(r_, index(i)))
            for j in range(num_columns):
                column = builder.add(n_, index(j))
                total = horizontal_sum(builder, sums[i * num_columns + j])
                if scaled:
                    total = builder.fmul(total, builder.load(builder.gep(scales.data, [column])))
                pointer = builder.gep(out, [column])
                before = builder.select(add_, builder.load(pointer), ir.Constant(FLOAT, 0.0))
                builder.store(builder.fadd(before, total), pointer)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(w, integer, scale, x, integer, y, types.boolean, rows, columns), generate


@intrinsic
def normalize_row(_: Any, x: Any, r: Any, weight: Any, epsilon: Any, y: Any) -> Any:
    """RMS norm of one row; y may be x."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        inputs, weights, outputs = (array_of(context, builder, signature.args[i], args[i]) for i in (0, 2, 4))
        source, target = row_pointer(builder, inputs, args[1]), row_pointer(builder, outputs, args[1])
        length = builder.extract_value(inputs.shape, 1)

        def square(k: Any, sums: list[Any]) -> list[Any]:
            value = load(builder, source, k)
            return [call(builder, "fma", value, value, sums[0])]

        [squares] = loop(builder, index(0), length, LANES, [constant(0.0)], square)
        mean = builder.fdiv(horizontal_sum(builder, squares), builder.sitofp(length, FLOAT))
        root = call(builder, "sqrt", splat(builder, builder.fadd(mean, args[3])))

        def scale(k: Any, _: list[Any]) -> list[Any]:
            normed = builder.fdiv(load(builder, source, k), root)
            store(builder, builder.fmul(normed, load(builder, weights.data, k)), target, k)
            return []

        loop(builder, index(0), length, LANES, [], scale)
        return context.get_dummy_value()

    return types.void(x, types.intp, weight, types.float32, y), generate


@intrinsic
def softmax_row(_: Any, scores: Any, r: Any, count: Any, scale: Any) -> Any:
    """Replace the first `count` scores of a row, whole vectors, by exp(scale * (s - largest)); return their sum."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        array = array_of(context, builder, signature.args[0], args[0])
        row = row_pointer(builder, array, args[1])

        def larger(k: Any, largest: list[Any]) -> list[Any]:
            return [call(builder, "maxnum", load(builder, row, k), largest[0])]

        [largest] = loop(builder, index(0), args[2], LANES, [constant(-3.0e38)], larger)
        shift, factor = splat(builder, horizontal_max(builder, largest)), splat(builder, args[3])

        def body(k: Any, sums: list[Any]) -> list[Any]:
            value = exp(builder, builder.fmul(builder.fsub(load(builder, row, k), shift), factor))
            store(builder, value, row, k)
            return [builder.fadd(sums[0], value)]

        [total] = loop(builder, index(0), args[2], LANES, [constant(0.0)], body)
        return horizontal_sum(builder, total)

    return types.float32(scores, types.intp, types.intp, types.float32), generate


@intrinsic(prefer_literal=True)
def weighted_values(
    _: Any, values: Any, first: Any, weights: Any, r: Any, count: Any, total: Any, y: Any, start: Any, width: Any
) -> Any:
    """y[r, start + d] = sum over t < count of weights[r, t] * values[t, first + d] / total, for each d < width."""
    vectors = width.literal_value // LANES

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        cached, shares, outputs = (array_of(context, builder, signature.args[i], args[i]) for i in (0, 2, 6))
        row, out = row_pointer(builder, shares, args[3]), row_pointer(builder, outputs, args[3])
        offsets = [builder.add(args[1], index(i * LANES)) for i in range(vectors)]

        def body(t: Any, sums: list[Any]) -> list[Any]:
            share, value = splat(builder, builder.load(builder.gep(row, [t]))), row_pointer(builder, cached, t)
            return [call(builder, "fma", share, load(builder, value, at), total) for at, total in zip(offsets, sums)]

        sums = loop(builder, index(0), args[4], 1, [constant(0.0)] * vectors, body)
        divisor = splat(builder, args[5])
        for i, value in enumerate(sums):
            store(builder, builder.fdiv(value, divisor), out, builder.add(args[7], index(i * LANES)))
        return context.get_dummy_value()

    integer = types.intp
    return types.void(values, integer, weights, integer, integer, types.float32, y, integer, width), generate


@intrinsic
def silu_and_mul(_: Any, gate_up: Any, r: Any, first: Any, last: Any, y: Any) -> Any:
    """y[r, first:last] = silu(gate) * up of one row, whose first half is gate and whose second is up."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        inputs, outputs = (array_of(context, builder, signature.args[i], args[i]) for i in (0, 4))
        source, target = row_pointer(builder, inputs, args[1]), row_pointer(builder, outputs, args[1])
        width = builder.extract_value(outputs.shape, 1)

        def body(k: Any, _: list[Any]) -> list[Any]:
            gate, up = load(builder, source, k), load(builder, source, builder.add(k, width))
            minus = call(builder, "minnum", builder.fsub(constant(-0.0), gate), constant(88.0))
            sigmoid = builder.fdiv(constant(1.0), builder.fadd(constant(1.0), exp(builder, minus)))
            store(builder, builder.fmul(builder.fmul(gate, sigmoid), up), target, k)
            return []

        loop(builder, args[2], args[3], LANES, [], body)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(gate_up, integer, integer, integer, y), generate


@intrinsic
def matrix_at(_: Any, address: Any, rows: Any, columns: Any, like: Any) -> Any:
    """The matrix at an address, of the type that `like` has."""
    matrix = types.Array(like.dtype, 2, "C")

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        array = context.make_array(matrix)(context, builder)
        data = builder.inttoptr(args[0], context.get_data_type(matrix.dtype).as_pointer())
        itemsize = index(matrix.dtype.bitwidth // 8)
        strides = [builder.mul(args[2], itemsize), itemsize]
        populate_array(array, data, [args[1], args[2]], strides, itemsize, None)
        return array._getvalue()

    return matrix(types.intp, types.intp, types.intp, like), generate


@intrinsic
def arrive(_: Any, counter: Any) -> Any:
    """Add one to an atomic counter."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        array = array_of(context, builder, signature.args[0], args[0])
        builder.atomic_rmw("add", array.data, index(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(counter), generate


@intrinsic
def arrived(_: Any, counter: Any) -> Any:
    """Read an atomic counter."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
        array = array_of(context, builder, signature.args[0], args[0])
        return builder.load_atomic(array.data, "seq_cst", 8)

    return types.int64(counter), generate


@njit(cache=True, nogil=True, inline="always")
def columns(x: Any, w: Any, scale: Any, y: Any, add: bool, n: int, r: int, rows: int) -> None:
    """Twelve columns of one to four rows, in tiles of twelve sums at most, which stay in registers."""
    if rows == 4:
        for j in range(0, COLUMNS, 3):
            tile(w, n + j, scale, x, r, y, add, 4, 3)
    elif rows == 3:
        for j in range(0, COLUMNS, 4):
            tile(w, n + j, scale, x, r, y, add, 3, 4)
    elif rows == 2:
        for j in range(0, COLUMNS, 6):
            tile(w, n + j, scale, x, r, y, add, 2, 6)
    else:
        for j in range(0, COLUMNS, 6):
            tile(w, n + j, scale, x, r, y, add, 1, 6)


@njit(cache=True, nogil=True)
def linear(x: Any, w: Any, scale: Any, y: Any, add: bool, first: int, last: int) -> None:
    """Columns `first` to `last` of y = x @ w.T, or of y += x @ w.T."""
    rows = x.shape[0]
    blocks = (rows + MAX_ROWS - 1) // MAX_ROWS  # as equal as can be
    n = first
    while n + COLUMNS <= last:
        r = 0
        for block in range(blocks):
            size = rows // blocks + (block < rows % blocks)
            columns(x, w, scale, y, add, n, r, size)
            r += size
        n += COLUMNS
    while n < last:
        for r in range(rows):
            tile(w, n, scale, x, r, y, add, 1, 1)
        n += 1


@njit(cache=True, nogil=True)
def rms_norm(x: Any, weight: Any, epsilon: float, y: Any) -> None:
    for r in range(x.shape[0]):
        normalize_row(x, r, weight, np.float32(epsilon), y)


@njit(cache=True, nogil=True)
def rotate(x: Any, head: int, cos: Any, sin: Any) -> None:
    """Apply the rotary embedding to one head of each row, in place."""
    width = cos.shape[1]
    half = width // 2
    for r in range(x.shape[0]):
        for i in range(half):
            at = head * width + i
            first, second = x[r, at], x[r, at + half]
            x[r, at] = first * cos[r, i] - second * sin[r, i]
            x[r, at + half] = second * cos[r, i + half] + first * sin[r, i + half]


@njit(cache=True, nogil=True)
def append(qkv: Any, head: int, cache: Any, length: int) -> None:
    """Copy one head of each row to the end of its cache."""
    width = cache.shape[1]
    for r in range(qkv.shape[0]):
        for d in range(width):
            cache[length + r, d] = qkv[r, head * width + d]


@njit(cache=True, nogil=True)
def attend(qkv: Any, head: int, keys: Any, values: Any, length: int, scores: Any, y: Any) -> None:
    """Let one head of each row attend to the cached tokens and to the rows up to its own."""
    rows, width, none = qkv.shape[0], keys.shape[1], np.empty(0, np.float32)
    scale = np.float32(1 / np.sqrt(width))
    queries = np.empty((rows, width), np.float32)
    for r in range(rows):
        for d in range(width):
            queries[r, d] = qkv[r, head * width + d]
    linear(queries, keys, none, scores, False, 0, length + rows)
    for r in range(rows):
        count = length + r + 1
        whole = (count + LANES - 1) // LANES * LANES
        for t in range(count, whole):
            scores[r, t] = -np.inf
        total = softmax_row(scores, r, whole, scale)
        for d in range(0, width, 32):
            weighted_values(values, d, scores, r, count, total, y, head * width + d, 32)


@njit(cache=True, nogil=True)
def share(count: int, multiple: int, rank: int, size: int) -> tuple[int, int]:
    """The range of `count` items, in whole multiples but for the last, that a rank of `size` computes."""
    parts = (count + multiple - 1) // multiple
    return min(count, parts * rank // size * multiple), min(count, parts * (rank + 1) // size * multiple)


@njit(cache=True, nogil=True)
def wait_for_all(counter: Any, goal: int) -> int:
    """Return when every rank has arrived; `goal` counts the arrivals before."""
    goal += counter[1]
    arrive(counter)
    while arrived(counter) < goal:
        pass
    return goal


@njit(cache=True, nogil=True)
def decoder_layers(
    rank: int, counter: Any, x: Any, layers: Any, shape: Any, like: Any, epsilon: float, cos: Any, sin: Any,
    length: int, projected: Any, attended: Any, hidden: Any, activated: Any,
) -> None:  # fmt: skip
    """Layers of a Llama, added to x in place; of several ranks, each in a thread, each computes its share of a product.

    `layers` has the addresses of their norms, matrices, biases and caches; `shape` the heads of queries and of the
    cache, and the cache's room. `counter` counts arrivals of ranks; its second number is how many there are.
    """
    size, rows, goal = counter[1], x.shape[0], 0
    heads, kv_heads, room = shape
    hidden_size, width, inner = x.shape[1], cos.shape[1], activated.shape[1]
    none, floats = np.empty(0, np.float32), np.empty((0, 0), np.float32)
    normed, scores = np.empty(x.shape, np.float32), np.empty((rows, length + rows + LANES), np.float32)
    total = (heads + 2 * kv_heads) * width
    for layer in range(layers.shape[0]):
        rms_norm(x, matrix_at(layers[layer, 0], 1, hidden_size, floats)[0], epsilon, normed)
        first, last = share(total, COLUMNS, rank, size)
        qkv = matrix_at(layers[layer, 1], total, hidden_size, like)
        linear(normed, qkv, none, projected, False, first, last)
        if layers[layer, 2]:
            bias = matrix_at(layers[layer, 2], 1, total, floats)
            for r in range(rows):
                for n in range(first, last):
                    projected[r, n] += bias[0, n]
        goal = wait_for_all(counter, goal)
        first, last = share(kv_heads, 1, rank, size)
        for kv in range(first, last):
            keys = matrix_at(layers[layer, 7] + 4 * kv * room * width, room, width, floats)
            values = matrix_at(layers[layer, 8] + 4 * kv * room * width, room, width, floats)
            rotate(projected, heads + kv, cos, sin)
            append(projected, heads + kv, keys, length)
            append(projected, heads + kv_heads + kv, values, length)
            for head in range(kv * (heads // kv_heads), (kv + 1) * (heads // kv_heads)):
                rotate(projected, head, cos, sin)
                attend(projected, head, keys, values, length, scores, attended)
        goal = wait_for_all(counter, goal)
        first, last = share(hidden_size, COLUMNS, rank, size)
        linear(attended, matrix_at(layers[layer, 3], hidden_size, heads * width, like), none, x, True, first, last)
        goal = wait_for_all(counter, goal)
        rms_norm(x, matrix_at(layers[layer, 4], 1, hidden_size, floats)[0], epsilon, normed)
        first, last = share(inner, 48, rank, size)  # columns and vectors both divide it
        gate_up = matrix_at(layers[layer, 5], 2 * inner, hidden_size, like)
        linear(normed, gate_up, none, hidden, False, first, last)
        linear(normed, gate_up, none, hidden, False, inner + first, inner + last)
        for r in range(rows):
            silu_and_mul(hidden, r, first, last, activated)
        goal = wait_for_all(counter, goal)
        first, last = share(hidden_size, COLUMNS, rank, size)
        linear(activated, matrix_at(layers[layer, 6], hidden_size, inner, like), none, x, True, first, last)
        goal = wait_for_all(counter, goal)
