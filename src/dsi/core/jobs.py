"""The table of jobs in flight: what each was asked for and the node that its text has reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsi.core.draft_tree import Node
from dsi.core.messages import Draft, Job, Prefill, Verify

MAX_FAILURES = 3  # in a row, after which a drafter is not used until the root moves


class JobTable:
    def __init__(self) -> None:
        self.open: dict[int, Job] = {}
        self.busy = 0  # drafts and verifications in flight
        self._attached: dict[int, list[Node]] = {}  # the nodes whose loss makes each of them obsolete
        self._nodes: dict[int, list[Node | None]] = {}  # what verifications cover
        self._drafts: dict[str, int] = {}  # in flight, of each drafter
        self._failures: dict[str, int] = {}  # of each drafter, in a row

    def add(self, job: Draft | Verify, attached: list[Node], nodes: Sequence[Node]) -> None:
        self.open[job.id], self._attached[job.id], self._nodes[job.id] = job, attached, list(nodes)
        for node in attached:
            node.jobs.add(job.id)
        self.busy += 1
        if isinstance(job, Draft):
            self._drafts[job.model] = self._drafts.get(job.model, 0) + 1

    def add_prefill(self, job: Prefill | Draft) -> None:
        """A prefill keeps its id and replaces the one before it; no branch of the tree is needed for it.

        Nor is one for a stream of the target's own text, which follows the root.
        """
        self.open[job.id] = job

    def node(self, id: int) -> Node:
        """The node where a job's text ends."""
        return self._attached[id][0]

    def nodes(self, id: int) -> list[Node | None]:
        """The nodes that a verification covers; None for those that were never drafted."""
        return self._nodes.get(id, [])

    def move(self, id: int, node: Node) -> None:
        """Record that the text of a draft now ends at this node."""
        [before] = self._attached[id]
        before.jobs.discard(id)
        self._attached[id] = [node]
        node.jobs.add(id)

    def obsolete(self, ids: Iterable[int]) -> list[int]:
        """Those of the jobs that have lost all their nodes."""
        return [id for id in dict.fromkeys(ids) if not any(node.alive for node in self._attached[id])]

    def close(self, id: int) -> None:
        job, attached = self.open.pop(id), self._attached.pop(id, None)
        if attached is None:  # a prefill
            return
        del self._nodes[id]
        for node in attached:
            node.jobs.discard(id)
        self.busy -= 1
        if isinstance(job, Draft):
            self._drafts[job.model] -= 1

    def drafting(self, model: str) -> bool:
        return self._drafts.get(model, 0) > 0

    @property
    def verifying(self) -> int:
        """Verifications in flight."""
        return self.busy - sum(self._drafts.values())

    # A drafter that keeps failing is not used until the root moves: the target goes on without it.

    def drafter_failed(self, model: str) -> None:
        self._failures[model] = self._failures.get(model, 0) + 1

    def drafter_answered(self, model: str) -> None:
        self._failures.pop(model, None)

    def root_moved(self) -> None:
        self._failures.clear()

    def failing(self, model: str) -> bool:
        return self._failures.get(model, 0) >= MAX_FAILURES

    def available(self, drafters: Sequence[str]) -> Sequence[str]:
        """The drafters that do not keep failing; if all do, the first."""
        if not self._failures:
            return drafters
        return [model for model in drafters if not self.failing(model)] or drafters[:1]
