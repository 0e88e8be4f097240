"""Forwards whose rows do not all see those before them: new tokens of several texts, and trees of draft tokens.

The keys of each text are in its own KV cache; in the mask of a forward one text's come after another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsi.models.kv_sequence import KVSequence
from dsi.models.tree_cache import TreeRows


class TextRows(NamedTuple):
    """What a forward computes of one text: tokens that are not cached, and nodes of a tree behind them."""

    sequence: KVSequence
    length: int  # tokens before them
    tokens: list[int]
    num_positions: int  # of the last tokens, whose logits are wanted
    tree: TreeRows | None = None

    @property
    def end(self) -> int:
        """Tokens of the text up to here."""
        return self.length + len(self.tokens)

    @property
    def row_tokens(self) -> list[int]:
        return self.tokens if self.tree is None else self.tokens + self.tree.tokens

    @property
    def num_logits(self) -> int:
        return self.num_positions if self.tree is None else self.num_positions + len(self.tree.asked)

    @property
    def slots(self) -> list[int]:
        """Where the keys and values of each row are."""
        text = range(self.length, self.end)
        return [*text] if self.tree is None else [*text, *(self.end + slot for slot in self.tree.computed)]

    @property
    def key_positions(self) -> list[int]:
        """The position of the token in each slot."""
        return [*range(self.end), *(self.end + depth for depth in (self.tree.depths if self.tree else ()))]

    @property
    def wanted(self) -> list[int]:
        """The rows whose logits are wanted."""
        count = len(self.tokens)
        text = range(count - self.num_positions, count)
        return [*text] if self.tree is None else [*text, *(count + row for row in self.tree.asked)]

    def visible(self) -> Tensor:
        """For each row, whether it sees each slot."""
        count = len(self.tokens)
        text = torch.ones((count, self.end), dtype=torch.bool).tril(self.length)
        if self.tree is None:
            return text
        visible = torch.zeros((count + len(self.tree.computed), self.end + len(self.tree.nodes)), dtype=torch.bool)
        visible[:count, : self.end] = text
        visible[count:, : self.end] = True
        visible[count:, self.end :] = self.tree.ancestors()
        return visible


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The rows of a forward, and the slots of all KV caches that each of them sees."""

    tokens: list[int]
    positions: Tensor
    key_positions: Tensor  # of all slots
    visible: Tensor  # [rows, slots]
    wanted: list[int]  # the rows whose logits are wanted

    @classmethod
    def of(cls, texts: Sequence[TextRows]) -> MaskedRows:
        tokens, positions, key_positions, wanted = list[int](), list[int](), list[int](), list[int]()
        for text in texts:
            own = text.key_positions
            wanted += [len(tokens) + row for row in text.wanted]
            tokens += text.row_tokens
            positions += [own[slot] for slot in text.slots]
            key_positions += own
        blocks = [text.visible() for text in texts]
        visible = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks).bool()  # type: ignore[no-untyped-call]
        return cls(tokens, torch.tensor(positions), torch.tensor(key_positions), visible, wanted)

    def visible_in(self, window: int) -> Tensor:
        """With a sliding window, which counts positions; 0 is none."""
        return self.visible & (self.positions[:, None] - self.key_positions < window) if window else self.visible
