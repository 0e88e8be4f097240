"""One model over several processes, as one backend: each holds a part of every matrix (tensor parallel).

The model's own plan says which matrices are cut and how. Every process, or rank, reads the same text into a
cache of its own heads; where their parts belong together they are summed, through gloo. The first rank is
the process that asks. It forks the others when it is first asked, so that all see one copy of the weights,
and tells them what to read by a pipe each: a collective call would not wait for ever. They go when it goes.
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

from dsi.models.child_process import close_other_fds, die_with_parent
from dsi.models.hf import Transformer, common_prefix_length
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.protocol import NEVER, CancelFlag, Cancelled

COLUMNS, ROWS = "colwise", "rowwise"
GATHERED = ("colwise_gather_output", "colwise_rep")  # by the newer and the older name, here and below
SCATTERED = ("rowwise_split_input", "rowwise_rep")
WHOLE = ("replicated", "replicated_with_grad_allreduce", "embedding_rowwise")  # as good, held by every rank
STYLES = (COLUMNS, ROWS, *GATHERED, *SCATTERED, *WHOLE)
HEADED = ("q_proj", "k_proj", "qkv_proj", "query_key_value")  # whose parts must be whole heads
PATIENCE = timedelta(seconds=60)  # with a rank that does not come to a sum: the others are never far behind
ALIKE = (Cancelled, ValueError, IndexError)  # what every rank raises at the same place, and goes on


class RankLost(SystemExit):
    """Another rank is gone. A server's process ends with it, and the fleet starts them all again."""


@dataclass
class Group:
    """The ranks of one model, as one of them sees them."""

    rank: int
    size: int
    flag: CancelFlag = NEVER
    _gloo: Any = None

    @property
    def met(self) -> bool:
        return self._gloo is not None

    def meet(self, folder: str) -> None:
        """When this is done all are there, and the folder is needed no longer."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or it would listen where the host's name leads
        store = distributed.FileStore(str(Path(folder) / "ranks"), self.size)  # type: ignore[attr-defined]
        self._gloo = distributed.ProcessGroupGloo(store, self.rank, self.size, PATIENCE)
        self._gloo.barrier().wait()

    def part(self) -> None:
        self._gloo = None

    def total(self, part: Tensor) -> Tensor:
        """The sum of all parts, with one number more: if the answer is not wanted any longer, all ranks
        learn it here, and stop at the same place.
        """
        unwanted = part.new_full((1,), float(self.flag.is_set()))
        summed = torch.cat((part.flatten(), unwanted))
        self._gloo.allreduce([summed]).wait()
        if summed[-1] > 0:
            raise Cancelled
        return summed[:-1].view(part.shape)

    def beside(self, part: Tensor) -> Tensor:
        """All parts, one beside the other."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._gloo.allgather([parts], [part.contiguous()]).wait()
        return torch.cat(parts, -1)

    def own(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This rank's part: a view."""
        return whole.chunk(self.size, dim)[self.rank]


class LlamaCpuRank(LlamaCpu):
    """What one rank holds of a lean Llama."""

    def __init__(self, model: Any, max_sequences: int, group: Group) -> None:
        super().__init__(model, max_sequences)
        self._group, self._cut = group, len(self._words) < model.config.vocab_size

    def _total(self, part: Tensor) -> Tensor:
        return self._group.total(part)

    def _every_word(self, scores: Tensor) -> Tensor:
        return self._group.beside(scores) if self._cut else scores


@dataclass
class RankProcess:
    """Another rank's process, and the pipe that tells it what to read."""

    process: int
    orders: BinaryIO
    tokens: Sequence[int] = ()  # what it was told last: only the difference is sent


@dataclass
class TensorParallel:
    """A transformers model that is split over `size` processes. `threads` are those of each; without them,
    the cores of this process are divided between the ranks.
    """

    model: Any
    size: int
    max_sequences: int = 4
    threads: int | None = None
    helpers: list[RankProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_tensor_parallel(self.model, self.size)
        self.groups = [Group(rank, self.size) for rank in range(self.size)]
        self._parts = [part(self.model, group, self.max_sequences) for group in self.groups]
        self.context = self._parts[0].context

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag = NEVER) -> Any:
        if cancelled.is_set():
            raise Cancelled
        try:
            self._start()
            self.groups[0].flag = cancelled
            for helper in self.helpers:
                _tell(helper, tokens, start)
            return self._parts[0].forward(tokens, start)
        except ALIKE:
            raise
        except Exception as error:  # gloo's, a pipe's: nothing else is different from rank to rank
            self.close()
            raise RankLost(1) from error
        except BaseException:  # it stopped where the others do not
            self.close()
            raise

    def close(self) -> None:
        """No helper is left."""
        for helper in self.helpers:
            with suppress(OSError):
                helper.orders.close()
            os.kill(helper.process, signal.SIGKILL)
            os.waitpid(helper.process, 0)
        self.helpers.clear()
        self.groups[0].part()

    def _start(self) -> None:
        if self.groups[0].met:
            return
        self._parts[0].clear_cache()
        cores = sorted(os.sched_getaffinity(0))
        with TemporaryDirectory(prefix="dsi-") as folder:
            self.helpers += [self._fork(rank, folder, cores) for rank in range(1, self.size)]
            self._settle(0, cores)
            self.groups[0].meet(folder)

    def _fork(self, rank: int, folder: str, cores: Sequence[int]) -> RankProcess:
        parent = os.getpid()
        theirs, ours = os.pipe()
        if process := os.fork():
            os.close(theirs)
            return RankProcess(process, open(ours, "wb"))
        try:
            die_with_parent()
            if os.getppid() == parent:
                self._follow(rank, folder, theirs, cores)
        finally:
            os._exit(1)

    def _follow(self, rank: int, folder: str, orders: int, cores: Sequence[int]) -> NoReturn:
        """The life of a helper: it reads what it is told to, until nobody is there to tell."""
        close_other_fds(orders)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the one who started all this
        self._settle(rank, cores)
        self.groups[rank].meet(folder)
        tokens: list[int] = []
        with open(orders, "rb") as told:
            while True:
                kept, fresh, start = pickle.load(told)
                tokens[kept:] = fresh
                with suppress(*ALIKE):
                    self._parts[rank].forward(tokens, start)

    def _settle(self, rank: int, cores: Sequence[int]) -> None:
        """On cores of its own, if there are enough."""
        if self.threads is None:
            own = cores[rank :: self.size] or [cores[rank % len(cores)]]
            os.sched_setaffinity(0, own)
        torch.set_num_threads(self.threads or len(own))


def _tell(helper: RankProcess, tokens: Sequence[int], start: int) -> None:
    kept = common_prefix_length(helper.tokens, tokens)
    pickle.dump((kept, list(tokens[kept:]), start), helper.orders)
    helper.orders.flush()
    helper.tokens = list(tokens)


def part(model: Any, group: Group, max_sequences: int) -> Transformer:
    """What one rank holds, in the leanest way to run it. The weights are views of the model's."""
    split = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    for module, style in planned(split):
        if style not in WHOLE:
            _cut(module, style, group)
    return LlamaCpuRank(split, max_sequences, group) if LlamaCpu.supports(model) else Transformer(split, max_sequences)


def planned(model: Any) -> list[tuple[Any, str]]:
    """The modules that the model's plan names, and how each is cut."""
    plan = getattr(model, "_tp_plan", None) or {}
    named = ((module, plan.get(_pattern(name))) for name, module in model.named_modules())
    return [(module, style) for module, style in named if style is not None]


def _pattern(name: str) -> str:
    """A plan has a star for the number of a layer."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _cut(linear: nn.Linear, style: str, group: Group) -> None:
    """Columns and rows are those of the transposed weight, by which the plans are named."""
    if style == COLUMNS or style in GATHERED:
        _cut_columns(linear, style in GATHERED, group)
    else:
        _cut_rows(linear, style in SCATTERED, group)


def _cut_columns(linear: nn.Linear, gathered: bool, group: Group) -> None:
    if linear.weight.shape[0] % group.size:  # a vocabulary, say: every rank computes it all
        return
    linear.weight = _still(group.own(linear.weight, 0))
    if linear.bias is not None:
        linear.bias = _still(group.own(linear.bias, 0))
    if gathered:
        linear.register_forward_hook(lambda *found: group.beside(found[-1]))


def _cut_rows(linear: nn.Linear, scattered: bool, group: Group) -> None:
    """A bias is added to the sum, once."""
    bias = linear.bias
    linear.register_parameter("bias", None)
    linear.weight = _still(group.own(linear.weight, 1))
    if scattered:
        linear.register_forward_pre_hook(lambda _, given: (group.own(given[0]),))
    add: Callable[[Tensor], Tensor] = (lambda x: x) if bias is None else (lambda x: x + bias)
    linear.register_forward_hook(lambda *found: add(group.total(found[-1])))


def _still(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def check_tensor_parallel(model: Any, size: int) -> None:
    """A model that cannot be split so is refused before anything is started."""
    says, kind = f"target mp {size}:", model.config.model_type
    if size < 1:
        raise ValueError(f"{says} must be at least 1")
    if not getattr(model.config, "base_model_tp_plan", None):
        raise ValueError(f"{says} a {kind} model has no plan by which it could be split")
    found = planned(model)
    if strange := sorted({style for _, style in found if style not in STYLES}):
        raise ValueError(f"{says} a {kind} model is split by {', '.join(strange)}, which is not known here")
    if any(style == COLUMNS for style in _headed(model)):
        _check_heads(model.config, says, size)
    for module, style in found:
        wide = _width(module, style)
        if wide % size:
            raise ValueError(f"{says} does not divide the model's width of {wide}")


def _headed(model: Any) -> list[str]:
    plan = model._tp_plan or {}
    return [style for name, style in plan.items() if name.rsplit(".", 1)[-1] in HEADED]


def _check_heads(config: Any, says: str, size: int) -> None:
    heads = config.num_attention_heads
    pairs = getattr(config, "num_key_value_heads", None) or heads
    for count, of in ((heads, "heads"), (pairs, "key and value heads")):
        if count % size:
            raise ValueError(f"{says} does not divide the model's {count} {of}")


def _width(module: Any, style: str) -> int:
    """What must be cut into equal parts; a matrix whose parts are gathered can also be held whole."""
    if style == COLUMNS:
        return int(module.weight.shape[0])
    return int(module.weight.shape[1]) if style in (ROWS, *SCATTERED) else 0
