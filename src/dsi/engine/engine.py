"""The engine for people: text in, text out, with models by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from dsi.core.adaptive import PRIOR_ACCEPTANCE, AdaptiveController, LatencyMonitor
from dsi.core.generation import Policy
from dsi.core.messages import Sampling
from dsi.core.policies import load_aware, policy_for
from dsi.core.request import Completion, Request, ScoreRequest
from dsi.core.sequence import Tokens
from dsi.core.spec import AUTO, SpecConfig, check_algorithm
from dsi.engine.config import EngineConfig
from dsi.fleets.loop import EngineLoop
from dsi.models.tokenizer import Detokenizer, StopStrings

if TYPE_CHECKING:
    from dsi.engine.build import Deployment
    from dsi.fleets.ray_actors import ResourceRequest
    from dsi.planning.plan import Offer


SECOND = 1000  # ms


class TextStream:
    """A text being written: iterate over its pieces; `completion` is there when it has ended."""

    def __init__(self, engine: Engine, request: Request, stops: Sequence[str]) -> None:
        self._engine, self._request = engine, request
        self._stops = StopStrings(stops)
        self._run = engine.submit(request)
        self._pieces: list[str] = []
        self._rest = self._written()

    def __iter__(self) -> Iterator[str]:
        """What has not been read yet: a second reader goes on where the first one stopped."""
        return self._rest

    def _written(self) -> Iterator[str]:
        detokenizer = Detokenizer(self._engine.text, self._request.prompt)
        for tokens in self._engine.follow(self._run):
            yield from self._show(self._stops.push(detokenizer.push(tokens)))
            if self._stops.stopped:
                self._engine.cancel(self._run)
                return
        yield from self._show(self._stops.push(detokenizer.finish()))
        if not self._stops.stopped:
            yield from self._show(self._stops.finish())

    def _show(self, piece: str) -> Iterator[str]:
        if piece:
            self._pieces.append(piece)
            yield piece

    @property
    def completion(self) -> Completion:
        done = self._run.completion()
        reason = "stop" if self._stops.stopped else done.finish_reason
        return replace(done, finish_reason=reason, text="".join(self._pieces), prompt=self._request.prompt)


class Engine(EngineLoop, AbstractContextManager["Engine"]):
    """`Engine.load(...)` starts one; close it, or use it in a `with` block, to stop its processes."""

    def __init__(
        self,
        loaded: Deployment,
        algorithm: str,
        lookahead: int | None,
        patience: int | None,
        acceptance: float = PRIOR_ACCEPTANCE,
    ) -> None:
        super().__init__(loaded.fleet)
        self.current_load.targets = loaded.sp
        self.text = loaded.text
        self.loaded = loaded
        self._algorithm, self._lookahead, self._patience = algorithm, lookahead, patience
        self._acceptance = acceptance
        self.plan: Sequence[Offer] = ()  # what it was chosen from, the fastest first

    @classmethod
    def load(
        cls,
        target: str = "builtin",
        drafter: str | Sequence[str] = "builtin",
        *,
        sp: int | None = None,
        target_mp: int = 1,
        algorithm: str = "dsi",
        lookahead: int | str = "auto",
        patience: int | str = "auto",
        dtype: str = "float32",
        threads: int | None = None,
        target_devices: str | None = None,
        drafter_device: str | None = None,
        vocab: str = "auto",
        texts: int | None = None,
        fleet: str | None = None,
        needs: Mapping[str, ResourceRequest] | None = None,
        hang_seconds: float | None = None,
        start_seconds: float | None = None,
        plan: str | None = None,
    ) -> Self:
        """Load the models and start a process for each server; `auto` measures and applies Eq. (1).

        Several drafters share one tree under DSI; the other algorithms use the first. With `target_devices`
        (`cuda:1,cuda:2`, `cuda:0/8` for slices of one GPU, `cuda:1+cuda:2` for one target over both) the
        servers compute there, SP degree, lookahead and patience are those that are fastest by what is
        measured, and the algorithm may be `auto`. With another vocabulary a drafter goes by shared tokens
        (`vocab` `tli`) or text (`slem`); `auto` chooses. Where more than a few requests run at once, `texts`
        says how many. With `fleet` `ray` the servers are actors on a Ray cluster, one of its own or, with
        `ray=ADDRESS`, one that is there; `needs` says what the target and the drafter ask of their machines.
        There, a server that is silent at its work for `hang_seconds` (60) counts as dead, and one that has
        not come after `start_seconds` (120) is not waited for. Each target can be split over `target_mp`
        processes (the paper's MP degree), which divide its cores; on a cluster, each has the CPUs of a whole
        one. The `plan` `auto` measures the pair on this machine's cores first, as `dsi plan --cores` does,
        and takes the arrangement and algorithm that come out fastest.
        """
        check_algorithm(algorithm, auto=True)
        numbers = whole("lookahead", lookahead, 1), whole("patience", patience, 0)
        if algorithm == AUTO:
            check_free(*numbers)
        config = EngineConfig(
            target,
            (drafter,) if isinstance(drafter, str) else tuple(drafter),
            vocab,
            sp,
            target_mp,
            dtype,
            threads,
            target_devices,
            drafter_device,
            fleet,
            resources=needs or {},
            hang_seconds=hang_seconds,
            start_seconds=start_seconds,
            max_num_seqs=texts,
            plan=plan,
        )
        if plan is not None:
            return cls._planned(config)
        degree = config.sp or 1
        if config.fleet is not None:
            from dsi.engine.build_ray import load_on_ray

            given = {"hang_seconds": hang_seconds, "start_seconds": start_seconds}
            limits: dict[str, Any] = {name: seconds for name, seconds in given.items() if seconds is not None}
            means = dtype, threads, vocab, texts, config.requested_resources, target_mp
            pair = load_on_ray(target, config.drafter, degree, config.ray_address, *means, **limits)
            return cls(pair, algorithm, *numbers)
        chosen = config.placement
        if chosen is None:
            from dsi.engine.build import TEXTS, load_pair

            pair = load_pair(target, config.drafter, degree, dtype, threads, vocab, texts or TEXTS, target_mp)
            return cls(pair, algorithm, *numbers)
        from dsi.engine.build_cuda import load_placed

        return cls(load_placed(target, config.drafter[0], chosen, dtype, sp), algorithm, *numbers)

    @classmethod
    def _planned(cls, config: EngineConfig) -> Self:
        from dsi.engine.build import load_pair
        from dsi.engine.profile_cpu import arranged

        chosen = arranged(config.target, config.drafter[0], config.dtype)
        pair = load_pair(config.target, config.drafter, chosen.sp, config.dtype, chosen.threads)
        engine = cls(pair, chosen.algorithm, chosen.lookahead, None, chosen.acceptance)
        engine.plan = chosen.offers
        return engine

    @property
    def algorithm(self) -> str:
        """What it writes with, if nothing else is asked for."""
        return self._algorithm

    @cached_property
    def mind(self) -> AdaptiveController:
        """What is known and learned of these models, for `auto`."""
        self.latency_monitor = LatencyMonitor(self.loaded.outlook, SECOND)
        return AdaptiveController(self.loaded.outlook, self.loaded.drafters, self._acceptance, self.latency_monitor)

    def generate(self, prompt: str | Tokens, **options: Any) -> Completion:
        """Write a text to its end. The options are those of `stream`."""
        writing = self.stream(prompt, **options)
        for _ in writing:
            pass
        return writing.completion

    def stream(
        self,
        prompt: str | Tokens,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        rule: str = "match",
        logprobs: int | None = None,
        stop: str | Sequence[str] = (),
        algorithm: str | None = None,
        lookahead: int | None = None,
        patience: int | None = None,
    ) -> TextStream:
        """Begin to write; iterate over the result for the text as it becomes certain.

        Under the rule `match` a seed gives one text, whatever the algorithm; under `reject`, `block` and
        `specinfer` one for each algorithm and lookahead, all of them exactly as likely as the target says.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, rule, logprobs=logprobs)
        tokens = self.text.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        policy = self.policy(algorithm or self.algorithm, lookahead, patience)
        request = self.request(tokens, max_new_tokens, policy, sampling)
        return TextStream(self, request, [stop] if isinstance(stop, str) else stop)

    def request(self, prompt: Tokens, wanted: int, policy: Policy, sampling: Sampling) -> Request:
        """No more than there is room for, and nothing that these models cannot do."""
        self._check_supported(sampling)
        return Request(prompt, self._room(prompt, wanted), policy, sampling, self.text.eos_token_ids)

    @property
    def patience(self) -> int:
        """Under DSI, at its own lookahead."""
        if self._patience is not None:
            return self._patience
        return self.loaded.patience(self._lookahead or self.loaded.lookahead("dsi"))

    def policy(self, algorithm: str, lookahead: int | None = None, patience: int | None = None) -> Policy:
        if algorithm == AUTO:
            check_free(lookahead or self._lookahead, patience if self._patience is None else self._patience)
            spec = SpecConfig(lookahead=self.loaded.block, drafters=tuple(self.loaded.drafters))
            return load_aware(self.mind, spec, self.current_load)
        block = lookahead or self._lookahead or self.loaded.lookahead(check_algorithm(algorithm))
        asked = self._patience if patience is None else patience
        if asked is None:
            asked = self.loaded.patience(block) if algorithm == "dsi" else 0
        spec = SpecConfig(algorithm, block, asked, self.loaded.horizon(block), drafters=tuple(self.loaded.drafters))
        policy = policy_for(spec)
        if algorithm != "dsi":
            return policy
        return load_aware(policy, replace(spec, lookahead=min(block, self.loaded.block)), self.current_load)

    def score_request(self, prompt: Tokens, logprobs: int) -> ScoreRequest:
        """A request for the top log probabilities of each token of a prompt."""
        sampling = Sampling(logprobs=logprobs)
        self._check_supported(sampling)
        self._room(prompt, 0)
        return ScoreRequest(prompt, sampling)

    def _check_supported(self, sampling: Sampling) -> None:
        if self.loaded.choices and (sampling.rule != "match" or sampling.logprobs is not None):
            what = "logprobs" if sampling.rule == "match" else f"rule {sampling.rule}"
            raise ValueError(f"{what}: on devices there are only match and no logprobs; leave them out")

    def _room(self, prompt: Tokens, wanted: int) -> int:
        """No more tokens than the context has room for."""
        context = self.loaded.context
        if context and len(prompt) >= context:
            raise ValueError(f"a prompt of {len(prompt)} tokens: the models' context is {context}")
        return min(wanted, context - len(prompt)) if context else wanted

    def close(self) -> None:
        self.fleet.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def check_free(lookahead: int | None, patience: int | None) -> None:
    for name, value in (("lookahead", lookahead), ("patience", patience)):
        if value is not None:
            raise ValueError(f"{name} {value} with the algorithm {AUTO}: it finds its own; leave one of them out")


def whole(name: str, value: int | str, least: int) -> int | None:
    """A number, or None for `auto`."""
    if value == "auto":
        return None
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name} {value!r}: must be a whole number or auto") from None
    if number < least:
        raise ValueError(f"{name} {number}: must be at least {least}")
    return number
