"""One request as a pure state machine: events in, steps out. No clock, no threads, no I/O.

Every event is handled the same way: record it in the draft tree and the table of jobs, move the root as far as
the target's tokens are known, cancel the jobs whose branch was pruned, and let the policy issue new ones. Only
the policy knows which algorithm this is. Each node is verified, passed and pruned at most once, so an event
costs the same at any length of text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any

from dsi.core.draft_tree import DraftTree, Node, TreeDraft
from dsi.core.jobs import JobTable
from dsi.core.messages import (
    DRAFTER,
    GREEDY,
    NO_STEP,
    TARGET,
    Draft,
    Drafted,
    DraftedBlock,
    DraftedLevel,
    Event,
    Failed,
    Job,
    Prefill,
    Sampling,
    Step,
    TopLogprobs,
    Verified,
    Verify,
)
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.spec import Decision, SpecConfig
from dsi.core.tree_shape import END, Expansions, num_grown

Policy = Callable[["Generation"], None]

# The next token according to each drafter, according to the target, and all draft tokens of the position.
VerifiedPosition = tuple[dict[str, int], int, Tokens]

DEFAULT_SPEC = SpecConfig()
PREFILL_EVERY = 16  # verified tokens between two prefills of idle servers
NO_TOKEN = -1  # of a drafter whose draft failed, and after a node that was never drafted
ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"  # how a token came into the text


@dataclass(slots=True)
class Tally:
    """What a request has asked of its models so far."""

    drafted: int = 0  # draft tokens received
    accepted: int = 0  # tokens of the text that had been drafted before they were verified
    forwards: int = 0  # verifications answered in time
    useful: int = 0  # of those, the ones that verified a position of the final text
    exposed: int = 0  # of those, the ones that returned a token nobody had drafted
    abandoned: int = 0  # verifications cancelled, started or not
    failed: int = 0  # jobs that failed, of any kind

    @property
    def wasted(self) -> int:
        """Draft tokens that did not become text."""
        return self.drafted - self.accepted


class Generation:
    def __init__(
        self,
        prompt: Iterable[int],
        max_new_tokens: int,
        policy: Policy,
        *,
        stop: Collection[int] = (),
        sampling: Sampling = GREEDY,
        drafter_contexts: Mapping[str, int] | None = None,
        streams: bool = False,
        most_verified_unseen: int = 0,
        ids: Iterator[int] | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens}: must be at least 1")
        self.max_new_tokens = max_new_tokens
        self.policy = policy
        self.sampling, self.needs_draft = sampling, sampling.needs_draft
        self.tree = DraftTree(prompt)
        self.jobs = JobTable()
        self.tally = Tally()
        self.origins: list[str] = []  # how each token came into the text
        self.verified: list[VerifiedPosition] = []
        self.top_logprobs: list[TopLogprobs] = []  # of each token, where the request asks for them
        self.decisions: list[Decision] = []  # of an adaptive policy
        self._drafter_contexts = {name: context for name, context in (drafter_contexts or {}).items() if context}
        self._stop_tokens = frozenset(stop)
        self._stopped = False
        self._block_size = 1  # tokens that the rule `block` verifies together: the lookahead of the last draft
        self._last_verifier: int | None = None  # the verification that moved the root last
        self._streams = streams  # whether a target can be asked for its text as a stream
        self._most_verified_unseen = most_verified_unseen  # draft tokens whose verification may start before they come
        self._stream: tuple[int, int] | None = None  # the id of such a job, and the length of the text it has reached
        self._emitted: list[int] = []  # what one event has verified
        self._started: list[Job] = []
        self._cancelled: list[int] = []
        self._tree_drafts: dict[int, TreeDraft] = {}  # in flight
        self._ids = count() if ids is None else ids
        self._prefill_id = next(self._ids)
        self._prefill_depth = -PREFILL_EVERY  # of the root when servers were last asked to prefill

    # State.

    @property
    def root(self) -> Node:
        """The end of the verified text."""
        return self.tree.root

    @property
    def busy(self) -> int:
        """Drafts and verifications in flight."""
        return self.jobs.busy

    @property
    def done(self) -> bool:
        return self._stopped or self.tree.root.depth >= self.max_new_tokens

    @property
    def finish_reason(self) -> str | None:
        """How it ended: `stop` (a stop token), `length`, or `cancelled`; None while it runs."""
        if self.done and self.root.depth and self.root.token in self._stop_tokens:
            return "stop"
        if self.root.depth >= self.max_new_tokens:
            return "length"
        return "cancelled" if self._stopped else None

    @property
    def origin(self) -> TokenSequence:
        """The prompt, by which servers tell this request from others."""
        return self.root.context.origin

    @property
    def progress(self) -> tuple[int, int]:
        """The number of verified tokens, and the number with the draft tokens after them."""
        return self.root.depth, self.tree.max_depth()

    @property
    def root_unverified(self) -> bool:
        """Whether no verification of the root is in flight."""
        return not self.done and self.root.verifier is None

    def job(self, id: int) -> Job | None:
        """The job in flight with this id."""
        return self.jobs.open.get(id)

    # Events.

    def start(self) -> Step:
        return self.replan()

    def handle(self, event: Event) -> Step:
        # A cancelled job may still be answered: an event without an open job, or of another kind than its job,
        # changes nothing.
        job = self.jobs.open.get(event.id)
        handler = EVENT_HANDLERS.get((job.__class__, event.__class__))
        if handler is None:
            return NO_STEP
        handler(self, job, event)
        self._advance()
        return self._step()

    def replan(self) -> Step:
        """Re-run the policy without a new event."""
        return self._step()

    def stop(self) -> Step:
        """End the request: nothing more is emitted, and every job in flight is cancelled."""
        self._stopped = True
        return self._step()

    def _on_drafted(self, job: Draft, event: Drafted) -> None:
        if job.model == TARGET:
            self._on_streamed(job, event)
            return
        self.tally.drafted += 1 + len(event.alternates)
        self.jobs.drafter_answered(job.model)
        tree, node, token = self.tree, self.jobs.node(job.id), event.token
        node.drafted_by[job.model] = token
        if self.needs_draft:
            node.draft_tokens = tuple((drafted, event.draft_probs) for drafted in (token, *event.alternates))
        for alternate in event.alternates:
            tree.grow(node, alternate, self._block_size)
        child = tree.tips[job.model] = tree.grow(node, token, self._block_size)
        self.jobs.move(job.id, child)
        if child.context.length >= job.context.length + job.count:
            self._close(job)
        elif token in self._stop_tokens:  # nothing follows a stop token: the rest of the draft is not wanted
            self._cancel([job.id])

    def _on_drafted_block(self, job: Draft, event: DraftedBlock) -> None:
        for token in event.tokens:
            if job.id not in self.jobs.open or self.done:  # nothing follows a stop token
                return
            self._on_drafted(job, Drafted(job.id, token))
            if job.model == TARGET:  # the next one follows the root, too
                self._advance()

    def _on_drafted_level(self, job: Draft, event: DraftedLevel) -> None:
        if event.level != self._tree_drafts[job.id].level:
            return  # repeated
        self.tally.drafted += sum(map(len, event.children))
        self.jobs.drafter_answered(job.model)
        draft = self._tree_drafts[job.id]
        covered = self.jobs.nodes(draft.verifier) if draft.verifier in self.jobs.open else None
        if covered is None:
            draft.verifier = None
        is_last = draft.grow(self.tree, event.children, job.model, self._block_size)
        if covered is not None:
            covered += draft.grown(len(covered) - 1)  # the first is the root
        if is_last:
            self._close(job)

    def _on_streamed(self, job: Draft, event: Drafted) -> None:
        # The target's own token, if verifications have not moved the root beyond it: then the stream is not wanted.
        root, length = self.tree.root, job.context.length if self._stream is None else self._stream[1]
        if length != root.context.length:
            self._cancel([job.id])
            return
        self.tally.forwards += 1
        self.jobs.drafter_answered(TARGET)
        root.target_token, root.verifier, self._last_verifier = event.token, job.id, None
        self._stream = job.id, length + 1
        if length + 1 >= job.context.length + job.count:
            self._close(job)

    def _on_verified(self, job: Verify, event: Verified) -> None:
        # The answer covers the last `width` positions of the job's text and the nodes of its tree. The root may have
        # passed some of them since, and others be pruned; the rule `block` may have cut the answer short, and then
        # its last token is a correction.
        tokens, top_logprobs = event.tokens, event.top_logprobs
        if not job.fits(tokens):
            raise ValueError(f"job {job.id}: {len(tokens)} tokens in answer to {job.num_positions} positions")
        self.tally.forwards += 1
        nodes = self._close(job)
        is_cut = len(tokens) < job.num_positions
        if is_cut:
            self._release(job, nodes)
        for i, (node, token) in enumerate(zip(nodes, tokens)):
            if node is not None and node.alive:
                node.target_token, node.verifier = token, job.id
                node.top_logprobs = top_logprobs[i] if top_logprobs else ()
                node.sampled = not node.draft_tokens or (is_cut and i == len(tokens) - 1)

    def _on_draft_failed(self, job: Draft, _: Failed) -> None:
        # The policy may draft again.
        self.tally.failed += 1
        if self._streams and job.model != TARGET:  # plain decoding would lose nothing to a drafter without a token
            self.jobs.node(job.id).drafted_by.setdefault(job.model, NO_TOKEN)
        draft = self._tree_drafts.get(job.id)
        self._close(job)
        if draft is not None and draft.verifier in self.jobs.open:
            self._cancel([draft.verifier])
        self.jobs.drafter_failed(job.model)

    def _on_verify_failed(self, job: Verify, _: Failed) -> None:
        # The same positions are verified again: deeper ones may be covered by now, and a gap before them would
        # never close.
        # A tree is not verified again as it was: the policy looks for the nodes that no verification covers.
        self.tally.failed += 1
        node = self.jobs.node(job.id)
        nodes = self._close(job)
        if job.tree or job.draft is not None:
            self._release(job, nodes)
        else:
            self.verify(node, job.width, job.alone)

    def _on_prefill_failed(self, _: Prefill, __: Failed) -> None:
        # The next prefill comes anyway.
        self.tally.failed += 1

    def _advance(self) -> None:
        """Move the root as far as the target's tokens are known, and emit those tokens."""
        tree, num_emitted = self.tree, len(self._emitted)
        while (token := tree.root.target_token) is not None and not self.done:
            self._emitted.append(token)
            self._account(tree.root, token)
            if pruned := tree.advance(token, self._block_size):
                self._cancel(self.jobs.obsolete(pruned))
            self._stopped = token in self._stop_tokens
        if len(self._emitted) > num_emitted:
            self.jobs.root_moved()

    def _account(self, passed: Node, token: int) -> None:
        """Record how the token after this node came into the text."""
        self.verified.append((passed.drafted_by, token, tuple(passed.children)))
        if token in passed.children:
            self.tally.accepted += 1
            self.origins.append(ACCEPTED)
        else:
            self.tally.exposed += 1
            self.origins.append(CORRECTED if passed.children else PLAIN)
        if self.sampling.logprobs is not None:
            self.top_logprobs.append(passed.top_logprobs)
        if passed.verifier != self._last_verifier:
            self.tally.useful += 1
            self._last_verifier = passed.verifier

    def _step(self) -> Step:
        if self.done:
            self._cancel(list(self.jobs.open))
        else:
            self.policy(self)
        emitted, self._emitted = tuple(self._emitted), []
        started, self._started = tuple(self._started), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        # The verification of a new root had been speculation on a deeper position until now.
        verifier = self.tree.root.verifier if emitted else None
        return Step(emitted, started, cancelled, (verifier,) if verifier in self.jobs.open else ())

    def _cancel(self, ids: list[int]) -> None:
        for id in ids:
            job = self.jobs.open[id]
            nodes = self._close(job)
            if isinstance(job, Verify):
                self.tally.abandoned += 1
                self._release(job, nodes)
        self._cancelled += ids

    def _close(self, job: Job) -> list[Node | None]:
        """Remove a job; return the nodes that it covers, those that were passed or pruned, too."""
        nodes = self.jobs.nodes(job.id)
        if (draft := self._tree_drafts.pop(job.id, None)) is not None:
            draft.stop(self.tree)
        if self._stream is not None and job.id == self._stream[0]:
            self._stream = None
        self.jobs.close(job.id)
        return nodes

    def _release(self, job: Verify, nodes: Iterable[Node | None]) -> None:
        """This verification will not cover these positions."""
        has_tree = bool(job.tree) or job.draft is not None
        for node in nodes:
            if node is not None and node.verifier == job.id:
                node.verifier = None
                if has_tree and node.alive and node is not self.tree.root:
                    self.tree.unverified.push(node)

    # What a policy may read...

    def tip(self, model: str = DRAFTER, among: Iterable[str] = ()) -> Node:
        """Where a drafter's tokens now end; if they were pruned, where those of the first survivor do."""
        return self.tree.tip(model, among)

    def room(self, tip: Node, model: str = DRAFTER) -> int:
        """How many tokens this drafter could usefully add after `tip`."""
        if self.jobs.failing(model) or (tip is not self.tree.root and tip.token in self._stop_tokens):
            return 0
        last = self.max_new_tokens if self.needs_draft else self.max_new_tokens - 1
        return int(max(0, min(last - tip.depth, self._context_room(tip, model))))

    def stops(self, node: Node) -> bool:
        """Whether the text ends with this node's token."""
        return node.token in self._stop_tokens

    def usable(self, drafters: Sequence[str]) -> Sequence[str]:
        """The drafters that neither keep failing nor have come to the end of their context; if none, the first."""
        available = self.jobs.available(drafters)
        if not self._drafter_contexts:
            return available
        return [model for model in available if self.in_context(model, self.tip(model, drafters))] or drafters[:1]

    def in_context(self, model: str, node: Node | None = None) -> bool:
        """Whether the text up to this node, by default the root, fits a drafter's context."""
        return self._context_room(node or self.tree.root, model) > 0

    def _context_room(self, node: Node, model: str) -> float:
        """How many tokens a drafter can add: the last one follows a text as long as its context."""
        context = self._drafter_contexts.get(model)
        return inf if context is None else context + 1 - node.context.length

    def verifiable(self, tip: Node) -> Node | None:
        """The last position up to `tip` that can be verified now: a rule may need its draft token."""
        return tip.parent if self.needs_draft and not tip.draft_tokens else tip

    @property
    def can_stream(self) -> bool:
        """Whether a target can continue the verified text by itself, as it does more quickly than token by token."""
        return self._streams and not self.jobs.failing(TARGET)

    # ...and what it may ask for.

    def draft(
        self, node: Node, count: int, model: str = DRAFTER, spec: SpecConfig = DEFAULT_SPEC, alone: bool = False
    ) -> None:
        if count < 1:
            raise ValueError(f"a draft of {count} tokens: must be at least 1")
        self._block_size = spec.lookahead or 1
        missing = (spec.min_draft or 0) - (node.depth - self.tree.root.depth)  # before the root is verified
        first_block = missing if missing > 0 else self._block_size
        options = self.sampling, node.block_start, self._block_size, first_block
        self._start(Draft(next(self._ids), node.context, count, model, *options, alone), [node], [])

    def verify(self, node: Node, width: int, alone: bool = False) -> None:
        """Verify the last `width` positions up to this node."""
        self.stop_stream()
        lead = node.depth - width + 1 - self.tree.root.depth
        nodes = node.lineage(width)
        draft_tokens = tuple(covered.draft_tokens for covered in reversed(nodes)) if self.needs_draft else ()
        job = Verify(next(self._ids), node.context, width, lead, self.sampling, draft_tokens, alone)
        self._start(job, [node], nodes[::-1])

    def go_on_as_tree(self, spec: SpecConfig) -> None:
        """Make what was drafted as a chain a part of a tree; no draft of a chain goes on."""
        chains = [id for id, job in self.jobs.open.items() if isinstance(job, Draft) and job.model in spec.drafters]
        self._cancel([id for id in chains if id not in self._tree_drafts])
        self.tree.queue_all(spec.chances)

    def draft_tree(self, expand: Sequence[tuple[Node, int]], model: str, spec: SpecConfig) -> None:
        """Draft so many children of each of these nodes, in one forward."""
        nodes = self.tree.with_ancestors(node for node, _ in expand)
        index = {node: i for i, node in enumerate(nodes)}
        expansions = tuple((index.get(node, END), count) for node, count in expand)
        self._grow(nodes, expansions, model, spec)

    def _grow(
        self, nodes: Sequence[Node], expansions: Expansions, model: str, spec: SpecConfig, alone: bool = False
    ) -> Draft:
        """Draft more nodes of a tree, which has these."""
        self._block_size = spec.lookahead or 1
        draft = TreeDraft(self.tree.root, nodes, expansions, spec.chances)
        context, tree = self.tree.root.context, self.tree.encode(nodes)
        job = Draft(next(self._ids), context, 1, model, self.sampling, tree=tree, expansions=expansions, alone=alone)
        self._tree_drafts[job.id] = draft
        self._start(job, draft.expanded, [])
        return job

    def draft_tree_and_verify(self, model: str, spec: SpecConfig, then: Expansions) -> None:
        """Draft a tree after the root, and verify the root and all of the tree in one forward, as SI does.

        Where the fleet can, it is told of both at once, and the verification follows the draft without waiting for us.
        """
        draft, root = self._grow([], then or ((END, 1),), model, spec, alone=True), self.tree.root
        num_drafted = num_grown(draft.expansions)
        if num_drafted <= self._most_verified_unseen:
            job = Verify(
                next(self._ids),
                root.context,
                1,
                sampling=self.sampling,
                alone=True,
                draft=draft.id,
                num_drafted=num_drafted,
            )
            self._tree_drafts[draft.id].verifier = job.id
            self._start(job, [root], [root])

    def verify_tree(self, nodes: Sequence[Node], alone: bool = False) -> None:
        """Verify what follows these nodes, the root or any below it, in one forward."""
        self.stop_stream()
        root, tree = self.tree.root, self.tree.with_ancestors(nodes)
        index = {node: i for i, node in enumerate(tree)}
        below = [node for node in nodes if node is not root]
        covered = [root, *below] if len(below) < len(nodes) else below
        among = set(covered)
        tops = [node for node in covered if node.parent not in among]
        lead = min(node.depth for node in covered) - root.depth
        job = Verify(
            next(self._ids),
            root.context,
            len(covered) - len(below),
            lead,
            self.sampling,
            alone=alone,
            tree=self.tree.encode(tree),
            asked=tuple(index[node] for node in below),
        )
        self._start(job, tops, covered)

    def stop_stream(self) -> None:
        """What is verified needs no stream of the target's text."""
        if self._stream is not None:
            self._cancel([self._stream[0]])

    def stream(self) -> None:
        """Let a target continue the verified text by itself, unless one does."""
        if self._stream is None:
            root, count = self.tree.root, self.max_new_tokens - self.tree.root.depth
            job = Draft(next(self._ids), root.context, count, TARGET, self.sampling, alone=True)
            self._stream = job.id, root.context.length
            self.jobs.add_prefill(job)
            self._started.append(job)

    def prefill(self) -> None:
        """Let idle targets prefill the prompt, and every so often the text verified since."""
        if self.tree.root.depth >= self._prefill_depth + PREFILL_EVERY:
            self._prefill_depth = self.tree.root.depth
            job = Prefill(self._prefill_id, self.tree.root.context)
            self.jobs.add_prefill(job)
            self._started.append(job)

    def _start(self, job: Draft | Verify, attached: list[Node], nodes: Sequence[Node]) -> None:
        if isinstance(job, Verify):
            for covered in nodes:
                covered.verifier = job.id
        self.jobs.add(job, attached, nodes)
        self._started.append(job)


# How each kind of event changes a generation, by the kind of job it answers; all others are ignored.
EVENT_HANDLERS: dict[tuple[type, type], Callable[[Generation, Any, Any], None]] = {
    (Draft, Drafted): Generation._on_drafted,
    (Draft, DraftedBlock): Generation._on_drafted_block,
    (Draft, DraftedLevel): Generation._on_drafted_level,
    (Draft, Failed): Generation._on_draft_failed,
    (Verify, Verified): Generation._on_verified,
    (Verify, Failed): Generation._on_verify_failed,
    (Prefill, Failed): Generation._on_prefill_failed,
}
