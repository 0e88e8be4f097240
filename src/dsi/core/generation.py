"""One request as a pure state machine: events in, steps out. No clock, no threads, no I/O.

Every event is handled the same way: learn it, advance the root as far as the truth is known, abandon the
jobs whose place fell off the tree, plan new ones. Which algorithm this is, only the policy knows. Each
node is judged, walked and cut off at most once, so an event costs the same at any length of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from dsi.core.draft_tree import Node
from dsi.core.messages import (
    DRAFTER,
    GREEDY,
    NOTHING,
    Draft,
    Drafted,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Sampling,
    Step,
    TopLogprobs,
    Verified,
    Verify,
)
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.spec import Decision, SpecConfig

Policy = Callable[["Generation"], None]

# What each drafter said of a place, what is true, and all that was guessed.
Judged = tuple[dict[str, int], int, Tokens]

DEFAULT = SpecConfig()
WARM_EVERY = 16  # sure tokens between two reminders to idle servers
ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"  # how a token came to stand in the text
TRIES = 3  # failures in a row after which a drafter is left alone until the root moves


@dataclass(slots=True)
class Tally:
    """What a request has asked of its models so far."""

    drafted: int = 0  # guesses received
    accepted: int = 0  # tokens of the text that had been guessed before they were known
    forwards: int = 0  # verifications answered in time
    useful: int = 0  # of those, the ones that judged a place of the final text
    exposed: int = 0  # of those, the ones that found a token nobody had guessed
    abandoned: int = 0  # verifications no longer wanted, begun or not
    failed: int = 0  # jobs that failed, of any kind

    @property
    def wasted(self) -> int:
        """Guesses that did not become text."""
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
        ids: Iterator[int] | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens}: must be at least 1")
        self.end = max_new_tokens
        self.policy = policy
        self.sampling, self.needs_guess = sampling, sampling.needs_guess
        self._block = 1  # tokens that the rule `block` verifies together: the lookahead of the last draft
        self.root = Node(TokenSequence.of(prompt), None, 0)  # the last place known to be true
        self.open: dict[int, Job] = {}  # jobs in flight
        self.busy = 0  # drafts and verifications among them
        self.tally = Tally()
        self.origins: list[str] = []  # how each token of the text came
        self.judged: list[Judged] = []  # what was guessed of each token, and what it was
        self.notes: list[TopLogprobs] = []  # what the target thought of each place, where somebody asks
        self.decisions: list[Decision] = []  # of a policy that changes its mind
        self.memo: Any = None  # what a policy wants to remember
        self._stop = frozenset(stop)
        self._stopped = False
        self._at: dict[int, Node] = {}  # the node each job in flight has reached
        self._tips: dict[str, Node] = {}  # the last guess of each drafter
        self._drafting: dict[str, int] = {}  # open drafts of each drafter
        self._failures: dict[str, int] = {}  # of each drafter, in a row
        self._seconds: deque[Node] = deque()  # second guesses that nobody has looked past
        self._asides: set[int] = set()  # open verifications of such
        self._judge: int | None = None  # the verification whose truth the root followed last
        self._wanted: list[Job] = []
        self._cancelled: list[int] = []
        self._ids = count() if ids is None else ids
        self._warm_id = next(self._ids)
        self._warmed = -WARM_EVERY  # depth of the text last asked to be held

    @property
    def done(self) -> bool:
        return self._stopped or self.root.depth >= self.end

    @property
    def finish_reason(self) -> str | None:
        """How it ended: `stop` (a stop token), `length`, or `cancelled`; None while it has not."""
        if self.done and self.root.depth and self.root.token in self._stop:
            return "stop"
        if self.root.depth >= self.end:
            return "length"
        return "cancelled" if self._stopped else None

    def start(self) -> Step:
        return self.look()

    def handle(self, event: Event) -> Step:
        if event.id not in self.open or isinstance(event, Prefilled):
            return NOTHING  # the last word of a cancelled job, or nothing new
        self._learn(event, self.open[event.id])
        return self._step(self._advance())

    def look(self) -> Step:
        """Nothing has happened here, but the policy may see the world with other eyes."""
        return self._step(())

    def stop(self) -> Step:
        """Give up: nothing more will be emitted, and every job in flight is cancelled."""
        self._stopped = True
        return self._step(())

    def _step(self, emit: Tokens) -> Step:
        if self.done:
            self._abandon(list(self.open))
        else:
            self.policy(self)
        wanted, self._wanted = tuple(self._wanted), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        return Step(emit, wanted, cancelled, self._urgent() if emit else ())

    def _learn(self, event: Event, job: Job) -> None:
        if isinstance(event, Drafted) and isinstance(job, Draft):
            self._learn_guess(job, event.token, event.odds, event.others)
        elif isinstance(event, Verified) and isinstance(job, Verify):
            self._learn_truth(job, event.tokens, event.notes)
        elif isinstance(event, Failed):
            self._learn_failure(job)

    def _learn_guess(self, job: Draft, token: int, odds: Any, others: Tokens) -> None:
        self.tally.drafted += 1 + len(others)
        node = self._at[job.id]
        node.said[job.model] = token
        if self.needs_guess:
            node.guesses = tuple((guess, odds) for guess in (token, *others))
        for other in others:
            second = self._grow(node, other)
            if job.branches > 1 and other not in self._stop:
                self._seconds.append(second)
        self._failures.pop(job.model, None)
        node.jobs.discard(job.id)
        node = self._at[job.id] = self._tips[job.model] = self._grow(node, token)
        node.jobs.add(job.id)
        if node.context.length >= job.context.length + job.count:
            self._close(job.id)
        elif token in self._stop:  # nothing follows a stop token: the rest of the stream is not wanted
            self._abandon([job.id])

    def _learn_truth(self, job: Verify, tokens: Tokens, notes: tuple[TopLogprobs, ...]) -> None:
        if not job.fits(tokens):
            raise ValueError(f"job {job.id}: {len(tokens)} tokens in answer to {job.width} places")
        self.tally.forwards += 1
        places = self._close(job.id).lineage(job.width)[::-1]
        cut = len(tokens) < job.width  # it ends with a correction, never the guess itself: that falls
        if cut:
            self._unwatch(job.id, places)
        passed = job.width - len(places)  # by the root, since it was asked for
        for place, token, note in zip(places, tokens[passed:], notes[passed:] or ((),) * len(places)):
            place.truth, place.watcher, place.note = token, job.id, note
            place.drawn = not place.guesses or (cut and place is places[len(tokens) - job.width - 1])

    def _grow(self, node: Node, token: int) -> Node:
        """What comes next if this token does; it lies in the same block unless that is full or cut short."""
        known = node.children.get(token)
        if known is not None:
            return known
        child = node.child(token)
        if not node.drawn and child.context.length - node.start < self._block:
            child.start = node.start
        return child

    def _learn_failure(self, job: Job) -> None:
        """A verification is asked for again as it was: deeper places may be watched by now, and a gap
        before them would never close. A draft is the policy's to repeat, and a reminder will come again.
        """
        self.tally.failed += 1
        if isinstance(job, Verify):
            self.verify(self._close(job.id), job.width, job.aside)
        elif isinstance(job, Draft):
            self._close(job.id)
            self._failures[job.model] = self._failures.get(job.model, 0) + 1

    def _advance(self) -> Tokens:
        """Follow the truth as far as it is known; every other guess falls off the tree."""
        sure: list[int] = []
        while (token := self.root.truth) is not None and not self.done:
            sure.append(token)
            passed = self.root
            self._account(passed, token)
            self.root = self._grow(passed, token)
            del passed.children[token]
            if lost := passed.fall():
                self._abandon(lost)
            self.root.parent = None  # what lies behind the root is only text now
            self._stopped = token in self._stop
        if sure:
            self._failures.clear()
        return tuple(sure)

    def _account(self, passed: Node, token: int) -> None:
        self.judged.append((passed.said, token, tuple(passed.children)))
        if token in passed.children:
            self.tally.accepted += 1
            self.origins.append(ACCEPTED)
        else:
            self.tally.exposed += 1
            self.origins.append(CORRECTED if passed.children else PLAIN)
        if self.sampling.logprobs is not None:
            self.notes.append(passed.note)
        if passed.watcher != self._judge:
            self.tally.useful += 1
            self._judge = passed.watcher

    def _abandon(self, ids: list[int]) -> None:
        """A job is worth finishing only while its place is still possible."""
        for id in ids:
            job, node = self.open[id], self._close(id)
            if isinstance(job, Verify):
                self.tally.abandoned += 1
                self._unwatch(id, node.lineage(job.width))
        self._cancelled += ids

    def _close(self, id: int) -> Node:
        job, node = self.open.pop(id), self._at.pop(id, self.root)
        node.jobs.discard(id)
        if isinstance(job, Draft):
            self._drafting[job.model] -= 1
        if isinstance(job, Verify):
            self._asides.discard(id)
        self.busy -= not isinstance(job, Prefill)
        return node

    def _unwatch(self, id: int, places: list[Node]) -> None:
        """This verification will not judge them."""
        for place in places:
            if place.watcher == id:
                place.watcher = None

    def _urgent(self) -> tuple[int, ...]:
        """The watch on the new root was deeper speculation until now."""
        watcher = self.root.watcher
        return () if watcher is None or watcher not in self.open else (watcher,)

    @property
    def origin(self) -> TokenSequence:
        """Where its text begins, which is no other request's."""
        return self.root.context.origin

    @property
    def reached(self) -> tuple[int, int]:
        """How many tokens are certain, and how many with the guesses beyond them."""
        root = tip = self.root.depth
        for node in self._tips.values():
            if node.alive and node.depth > tip:
                tip = node.depth
        return root, tip

    @property
    def waits(self) -> bool:
        """Whether nobody watches the root."""
        return not self.done and self.root.watcher is None

    # What a policy may ask...

    def tip(self, model: str = DRAFTER, among: Iterable[str] = ()) -> Node:
        """Where this drafter's guesses now end; if they fell, where those of the first survivor do."""
        for name in (model, *among):
            node = self._tips.get(name)
            if node is not None and node.alive and node is not self.root:
                return node
        return self.root

    def drafting(self, model: str = DRAFTER) -> bool:
        return self._drafting.get(model, 0) > 0

    @property
    def verifying(self) -> int:
        """Verifications in flight, without the looks aside."""
        return self.busy - sum(self._drafting.values()) - len(self._asides)

    def lost(self, model: str = DRAFTER) -> bool:
        """Whether this drafter keeps failing; it is tried again when the root moves."""
        return self._failures.get(model, 0) >= TRIES

    def willing(self, drafters: Sequence[str]) -> Sequence[str]:
        """Those of them that do not keep failing; if all do, the first."""
        if not self._failures:
            return drafters
        return [model for model in drafters if not self.lost(model)] or drafters[:1]

    def room(self, tip: Node, model: str = DRAFTER) -> int:
        """How many guesses this drafter could usefully add after `tip`."""
        if self.lost(model) or (tip is not self.root and tip.token in self._stop):
            return 0
        last = self.end if self.needs_guess else self.end - 1
        return last - tip.depth

    def judgeable(self, tip: Node) -> Node | None:
        """The last place up to `tip` that can be judged now: a rule may need the guess about it."""
        return tip.parent if self.needs_guess and not tip.guesses else tip

    def unwatched(self, tip: Node) -> int:
        """How many places, ending at `tip`, no target has judged or is judging."""
        run = 0
        node: Node | None = tip
        while node is not None and node.watcher is None:
            run += 1
            node = node.parent
        return run

    @property
    def asides(self) -> int:
        """Second guesses that are being looked past; if one has become the root, it is no aside any more."""
        return len(self._asides) - (self.root.watcher in self._asides)

    def second(self) -> Node | None:
        """The first second guess that nobody looks past yet, once the guess it stands by is being judged.

        Before that, deeper guesses would find it watched, and the gap above it would never close.
        """
        while self._seconds:
            node = self._seconds[0]
            if node.watcher is None and node.alive and (above := node.parent) and above.truth is None:
                return None if above.watcher is None else node
            self._seconds.popleft()
        return None

    # ...and what it may ask for.

    def draft(self, node: Node, count: int, model: str = DRAFTER, spec: SpecConfig = DEFAULT) -> None:
        if count < 1:
            raise ValueError(f"a draft of {count} tokens: must be at least 1")
        self._drafting[model] = self._drafting.get(model, 0) + 1
        self._block = spec.lookahead or 1
        options = self.sampling, node.start, self._block, spec.branches, spec.min_ratio
        self._want(Draft(next(self._ids), node.context, count, model, *options), node)

    def verify(self, node: Node, width: int, aside: bool = False) -> None:
        lead = node.depth - width + 1 - self.root.depth
        places = node.lineage(width)
        guesses = tuple(place.guesses for place in reversed(places)) if self.needs_guess else ()
        job = Verify(next(self._ids), node.context, width, lead, self.sampling, guesses, aside)
        if aside:
            self._asides.add(job.id)
        for place in places:
            place.watcher = job.id
        self._want(job, node)

    def remind(self) -> None:
        """Let servers that would idle read the prompt, and every so often catch up with the sure text."""
        if self.root.depth >= self._warmed + WARM_EVERY:
            self._warmed = self.root.depth
            warm = self.open[self._warm_id] = Prefill(self._warm_id, self.root.context)
            self._wanted.append(warm)

    def _want(self, job: Draft | Verify, node: Node) -> None:
        self.open[job.id], self._at[job.id] = job, node
        node.jobs.add(job.id)
        self.busy += 1
        self._wanted.append(job)
