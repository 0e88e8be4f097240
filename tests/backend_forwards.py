"""Forwards of a backend that several tests compare."""

from collections.abc import Sequence
from typing import Any

from dsi.core.tree_shape import Tree
from dsi.models.protocol import NEVER, CancelFlag, ForwardRequest, PackingBackend


def forward_tree(
    model: PackingBackend,
    tokens: Sequence[int],
    start: int,
    tree: Tree,
    asked: Sequence[int],
    cancelled: CancelFlag = NEVER,
) -> Any:
    """The logits of one text, with a tree behind it."""
    [logits] = model.forward_packed([ForwardRequest(tokens, start, cancelled=cancelled, tree=tree, asked=asked)])
    return logits


def forward_packed(model: PackingBackend, texts: Sequence[tuple[Sequence[int], int]]) -> list[Any]:
    """The logits of several texts, each from a start on."""
    return model.forward_packed([ForwardRequest(*text) for text in texts])
