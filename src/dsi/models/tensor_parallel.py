"""One model split over several processes (tensor parallelism), as one backend.

The model's own `_tp_plan` says which matrices are split and how. Every process, or rank, computes the same
text with a KV cache of its own heads; partial results are combined by gloo collectives. Rank 0 is the calling
process. It forks the others at its first forward, so that all share one copy of the weights, and sends them
their requests by pipes, since a collective would time out while idle. They end when it ends.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor, distributed, nn

from dsi.models.hf import Transformer
from dsi.models.kv_sequence import common_prefix_length
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.process_utils import close_other_fds, die_with_parent
from dsi.models.protocol import NEVER, CancelFlag, Cancelled

COLUMNS, ROWS = "colwise", "rowwise"
GATHERED = ("colwise_gather_output", "colwise_rep")  # the newer and the older name, here and below
SCATTERED = ("rowwise_split_input", "rowwise_rep")
REPLICATED = ("replicated", "replicated_with_grad_allreduce", "embedding_rowwise")  # held whole by every rank
STYLES = (COLUMNS, ROWS, *GATHERED, *SCATTERED, *REPLICATED)
HEAD_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value")  # split between heads only
TIMEOUT = timedelta(seconds=60)  # for a rank to join a collective: ranks are never far apart
RAISED_ON_ALL_RANKS = (Cancelled, ValueError, IndexError)  # every rank raises these at the same point


class RankLost(SystemExit):
    """Another rank has died. The server's process ends with it, and the fleet restarts them all."""


@dataclass
class Group:
    """One rank's view of the process group."""

    rank: int
    size: int
    cancelled: CancelFlag = NEVER
    gloo: Any = None  # the process group, once all ranks have joined

    def init_group(self, folder: str) -> None:
        """Wait until all ranks have joined; afterwards the folder is no longer needed."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens where the host name resolves to
        store = distributed.FileStore(str(Path(folder) / "ranks"), self.size)  # type: ignore[attr-defined]
        self.gloo = distributed.ProcessGroupGloo(store, self.rank, self.size, TIMEOUT)
        self.gloo.barrier().wait()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the partial results, and the cancel flags with them: all ranks stop at the same point."""
        flag = partial.new_full((1,), float(self.cancelled.is_set()))
        total = torch.cat((partial.flatten(), flag))
        self.gloo.allreduce([total]).wait()
        if total[-1] > 0:
            raise Cancelled
        return total[:-1].view(partial.shape)

    def all_gather(self, shard: Tensor) -> Tensor:
        """Concatenate all ranks' shards along the last dimension."""
        shards = [torch.empty_like(shard) for _ in range(self.size)]
        self.gloo.allgather([shards], [shard.contiguous()]).wait()
        return torch.cat(shards, -1)

    def shard(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This rank's shard, as a view."""
        return whole.chunk(self.size, dim)[self.rank]


class LlamaCpuRank(LlamaCpu):
    """One rank's shard of a Llama on the CPU."""

    def __init__(self, model: Any, max_sequences: int, group: Group) -> None:
        super().__init__(model, max_sequences)
        self._group, self._splits_vocab = group, len(self._lm_head) < model.config.vocab_size

    def _all_reduce(self, partial: Tensor) -> Tensor:
        return self._group.all_reduce(partial)

    def _all_gather(self, logits: Tensor) -> Tensor:
        return self._group.all_gather(logits) if self._splits_vocab else logits


@dataclass
class RankProcess:
    """Another rank's process, and the pipe that carries its requests."""

    pid: int
    requests: BinaryIO
    tokens: Sequence[int] = ()  # of the last request: only the difference is sent


@dataclass
class TensorParallel:
    """A transformers model split over `size` processes, with `threads` each.

    Without `threads`, the cores of this process are divided between the ranks.
    """

    model: Any
    size: int
    max_sequences: int = 4
    threads: int | None = None
    helpers: list[RankProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_tensor_parallel(self.model, self.size)
        self.groups = [Group(rank, self.size) for rank in range(self.size)]
        self._shards = [shard_model(self.model, group, self.max_sequences) for group in self.groups]
        self.context = self._shards[0].context

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag = NEVER) -> Any:
        if cancelled.is_set():
            raise Cancelled
        try:
            self._start()
            self.groups[0].cancelled = cancelled
            for helper in self.helpers:
                _send(helper, tokens, start)
            return self._forward(0, tokens, start)
        except RAISED_ON_ALL_RANKS:
            raise
        except Exception as error:  # from gloo or a pipe: nothing else differs between ranks
            self.close()
            raise RankLost(1) from error
        except BaseException:  # this rank stopped where the others do not
            self.close()
            raise

    def close(self) -> None:
        """Kill the other ranks."""
        for helper in self.helpers:
            with suppress(OSError):
                helper.requests.close()
            os.kill(helper.pid, signal.SIGKILL)
            os.waitpid(helper.pid, 0)
        self.helpers.clear()
        self.groups[0].gloo = None

    def _start(self) -> None:
        if self.groups[0].gloo is not None:
            return
        self._shards[0].clear_cache()
        cores = sorted(os.sched_getaffinity(0))
        with TemporaryDirectory(prefix="dsi-") as folder:
            self.helpers += [self._fork(rank, folder, cores) for rank in range(1, self.size)]
            self._pin(0, cores)
            self.groups[0].init_group(folder)

    def _fork(self, rank: int, folder: str, cores: Sequence[int]) -> RankProcess:
        parent = os.getpid()
        reader, writer = os.pipe()
        if pid := os.fork():
            os.close(reader)
            return RankProcess(pid, open(writer, "wb"))
        try:
            die_with_parent()
            if os.getppid() == parent:
                self._run_rank(rank, folder, reader, cores)
        finally:
            os._exit(1)

    def _run_rank(self, rank: int, folder: str, reader: int, cores: Sequence[int]) -> NoReturn:
        """Compute the forwards that rank 0 requests, until its end of the pipe is closed."""
        close_other_fds(reader)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by rank 0
        self._pin(rank, cores)
        self.groups[rank].init_group(folder)
        tokens: list[int] = []
        with open(reader, "rb") as requests:
            while True:
                num_shared, new_tokens, start = pickle.load(requests)
                tokens[num_shared:] = new_tokens
                with suppress(*RAISED_ON_ALL_RANKS):
                    self._forward(rank, tokens, start)

    def _forward(self, rank: int, tokens: Sequence[int], start: int) -> Any:
        """Every rank looks in its KV caches for the tokens: a list that it knows is not the other ranks' list."""
        return self._shards[rank].forward(list(tokens), start)

    def _pin(self, rank: int, cores: Sequence[int]) -> None:
        """Give each rank its own cores, if there are enough."""
        if self.threads is None:
            own = cores[rank :: self.size] or [cores[rank % len(cores)]]
            os.sched_setaffinity(0, own)
        torch.set_num_threads(self.threads or len(own))


def _send(helper: RankProcess, tokens: Sequence[int], start: int) -> None:
    num_shared = common_prefix_length(helper.tokens, tokens)
    pickle.dump((num_shared, list(tokens[num_shared:]), start), helper.requests)
    helper.requests.flush()
    helper.tokens = list(tokens)


def shard_model(model: Any, group: Group, max_sequences: int) -> Transformer:
    """Return one rank's backend. Its weights are views of the model's."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    split = copy.deepcopy(model, shared)
    for module, style in planned_modules(split):
        if style not in REPLICATED:
            _split(module, style, group)
    if LlamaCpu.supports(model):
        return LlamaCpuRank(split, max_sequences, group)
    return Transformer(split, max_sequences)


def planned_modules(model: Any) -> list[tuple[Any, str]]:
    """Return the modules in the model's plan, each with the style by which it is split."""
    plan = getattr(model, "_tp_plan", None) or {}
    named = ((module, plan.get(_pattern(name))) for name, module in model.named_modules())
    return [(module, style) for module, style in named if style is not None]


def _pattern(name: str) -> str:
    """Replace layer numbers by the star that a plan has for them."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _split(linear: nn.Linear, style: str, group: Group) -> None:
    """Columns and rows are those of the transposed weight, after which the plans' styles are named."""
    if style == COLUMNS or style in GATHERED:
        _split_columns(linear, style in GATHERED, group)
    else:
        _split_rows(linear, style in SCATTERED, group)


def _split_columns(linear: nn.Linear, gathered: bool, group: Group) -> None:
    if linear.weight.shape[0] % group.size:  # for example a vocabulary: every rank computes all of it
        return
    linear.weight = _frozen(group.shard(linear.weight, 0))
    if linear.bias is not None:
        linear.bias = _frozen(group.shard(linear.bias, 0))
    if gathered:
        linear.register_forward_hook(lambda *arguments: group.all_gather(arguments[-1]))


def _split_rows(linear: nn.Linear, scattered: bool, group: Group) -> None:
    """Add the bias once, to the sum."""
    bias = linear.bias
    linear.register_parameter("bias", None)
    linear.weight = _frozen(group.shard(linear.weight, 1))
    if scattered:
        linear.register_forward_pre_hook(lambda _, inputs: (group.shard(inputs[0]),))
    add_bias: Callable[[Tensor], Tensor] = (lambda x: x) if bias is None else (lambda x: x + bias)
    linear.register_forward_hook(lambda *arguments: add_bias(group.all_reduce(arguments[-1])))


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def check_tensor_parallel(model: Any, size: int) -> None:
    """Refuse a model that cannot be split into `size` shards, before any process is started."""
    subject, kind = f"target mp {size}:", model.config.model_type
    if size < 1:
        raise ValueError(f"{subject} must be at least 1")
    if not getattr(model.config, "base_model_tp_plan", None):
        raise ValueError(f"{subject} a {kind} model has no plan by which it could be split")
    modules = planned_modules(model)
    if unknown := sorted({style for _, style in modules if style not in STYLES}):
        raise ValueError(f"{subject} a {kind} model is split by {', '.join(unknown)}, which is not known here")
    if any(style == COLUMNS for style in _head_styles(model)):
        _check_heads(model.config, subject, size)
    for module, style in modules:
        width = _split_width(module, style)
        if width % size:
            raise ValueError(f"{subject} does not divide the model's width of {width}")


def _head_styles(model: Any) -> list[str]:
    plan = model._tp_plan or {}
    return [style for name, style in plan.items() if name.rsplit(".", 1)[-1] in HEAD_PROJECTIONS]


def _check_heads(config: Any, subject: str, size: int) -> None:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for count, kind in ((heads, "heads"), (kv_heads, "key and value heads")):
        if count % size:
            raise ValueError(f"{subject} does not divide the model's {count} {kind}")


def _split_width(module: Any, style: str) -> int:
    """The dimension that must divide evenly; a matrix whose outputs are gathered can also be replicated."""
    if style == COLUMNS:
        return int(module.weight.shape[0])
    return int(module.weight.shape[1]) if style in (ROWS, *SCATTERED) else 0
