"""Servers: a model with a name, a role, and the prefixes in its KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsi.core.messages import TARGET
from dsi.core.sequence import TokenSequence
from dsi.core.tree_shape import END, Tree
from dsi.models.protocol import Model

Trie = dict[int, Any]  # draft tokens, and what follows each of them


@dataclass
class CachedPrefix:
    """The tokens of one request that a server has seen, and how many of them its model has computed."""

    context: TokenSequence
    tokens: list[int]  # of the context
    num_cached: int | None = None  # tokens in the KV cache; None: the request is new to this server
    draft_tokens: Trie = field(default_factory=dict)  # computed after the text as a tree

    def switch_to(self, context: TokenSequence) -> None:
        """Keep the prefix shared with the last context; only the difference is left to compute."""
        shared = self.context.common_prefix(context)
        if shared < len(self.tokens):
            self.draft_tokens = {}
        del self.tokens[shared:]
        self.context = context
        self.num_cached = None if self.num_cached is None else min(self.num_cached, shared)
        for token in context.since(shared):
            self._append(token)

    def append(self, token: int) -> None:
        self.context = self.context.then(token)
        self._append(token)

    def _append(self, token: int) -> None:
        """What was computed of the tree below this token is kept."""
        if token in self.draft_tokens and self.num_cached == len(self.tokens):
            self.num_cached += 1
        self.draft_tokens = self.draft_tokens.pop(token, {})
        self.tokens.append(token)

    def num_new_nodes(self, tree: Tree) -> int:
        """How many nodes of a tree after the text were not computed yet."""
        return len(self.new_nodes(tree))

    def new_nodes(self, tree: Tree) -> list[int]:
        """Which they are, by number."""
        if not tree:
            return []
        nodes: dict[int, Trie | None] = {END: self.draft_tokens}
        for i, (parent, token) in enumerate(tree):
            nodes[i] = (nodes[parent] or {}).get(token)
        return [i for i, node in nodes.items() if node is None]

    def add_tree(self, tree: Tree) -> None:
        """Record that a tree after the text was computed."""
        nodes: dict[int, Trie] = {END: self.draft_tokens}
        for i, (parent, token) in enumerate(tree):
            nodes[i] = nodes[parent].setdefault(token, {})


@dataclass
class PrefixTable:
    """The cached prefix of each request on one server; evicts the least recently used beyond `capacity`.

    With `shared_kv` several servers fill one KV cache: a text counts as cached as soon as one of them starts on
    it, and none of them needs a prefill.
    """

    capacity: int = 128
    shared_kv: bool = False
    entries: OrderedDict[TokenSequence, CachedPrefix] = field(default_factory=OrderedDict)

    def lookup(self, context: TokenSequence) -> CachedPrefix:
        """Return the request's cached prefix, switched to this context."""
        origin = context.origin
        prefix = self.entries.pop(origin, None) or CachedPrefix(origin, list(origin))
        self.entries[origin] = prefix
        if len(self.entries) > self.capacity:
            self.entries.popitem(last=False)
        prefix.switch_to(context)
        return prefix


@dataclass
class Server:
    """A processor with a model on it; `role` is `target`, or the name of a drafter."""

    name: str
    role: str
    model: Model
    prefixes: PrefixTable = field(default_factory=PrefixTable)


def make_servers(
    targets: Iterable[Model], drafters: Mapping[str, Model], shared_kv: bool = False, capacity: int = 128
) -> list[Server]:
    """Create target-1, target-2, ..., then the drafters by their names; each knows so many requests."""
    servers = [
        Server(f"{TARGET}-{i}", TARGET, model, PrefixTable(capacity, shared_kv)) for i, model in enumerate(targets, 1)
    ]
    return servers + [Server(name, name, model, PrefixTable(capacity)) for name, model in drafters.items()]


def by_name(servers: Iterable[Server]) -> dict[str, Server]:
    """Index servers by name; two of one name are an error."""
    named: dict[str, Server] = {}
    for server in servers:
        if named.setdefault(server.name, server) is not server:
            raise ValueError(f"two servers are called {server.name!r}")
    return named
