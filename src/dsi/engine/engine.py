"""The engine: text in, text out, with models by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from dsi.core.adaptive import PRIOR_ACCEPTANCE, AdaptiveController, LatencyMonitor
from dsi.core.generation import Policy
from dsi.core.messages import GREEDY, Sampling
from dsi.core.policies import load_aware, policy_for, streamed
from dsi.core.progress import Status, no_status
from dsi.core.request import Completion, Request, ScoreRequest, VerifyRequest
from dsi.core.sequence import Tokens
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import AUTO, SpecConfig
from dsi.core.text_table import MAX_GROWTH, TextTable
from dsi.engine.config import DEFAULT_SPEC, EngineConfig, fill_spec, make_configs, make_spec
from dsi.engine.profile_cache import keep_profile, read_profile
from dsi.fleets.loop import EngineLoop, Fleet
from dsi.models.tokenizer import TextOutput, Tokenizer
from dsi.planning.shared_forwards import TREE_SIZES

if TYPE_CHECKING:
    from dsi.engine.deployment import Deployment
    from dsi.planning.search import DeploymentPlan

MS_PER_SECOND = 1000
MIN_LEARNED = 64  # verified draft tokens from which an acceptance rate is kept


class TextStream:
    """A text being generated: iterate over it for what is verified; `completion` is available at its end."""

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, request: Request, stops: Sequence[str]) -> None:
        self._loop, self._request = loop, request
        min_tokens = request.sampling.min_tokens
        self._output = TextOutput(tokenizer, request.prompt, stops, request.stop, min_tokens=min_tokens)
        self._run = loop.submit(request)
        self._text: list[str] = []
        self._iterator = self._generate()

    def __iter__(self) -> Iterator[str]:
        """Iterate over what has not been read yet: a second reader continues where the first one stopped."""
        return self._iterator

    def _generate(self) -> Iterator[str]:
        for tokens in self._loop.follow(self._run):
            _, text = self._output.push(tokens)
            yield from self._emit(text)
            if self._output.stopped:
                self._loop.cancel(self._run)
                return
        yield from self._emit(self._output.finish())

    def _emit(self, text: str) -> Iterator[str]:
        if text:
            self._text.append(text)
            yield text

    @property
    def completion(self) -> Completion:
        completion = self._run.completion()
        if self._output.stopped:
            completion = replace(completion.first(self._output.num_tokens), finish_reason="stop")
        return replace(completion, text="".join(self._text), prompt=self._request.prompt)


OLD_NAMES = {"text": "tokenizer", "loaded": "deployment", "plan": "plans"}  # kept for one release


class Engine(AbstractContextManager["Engine"]):
    """`Engine.load(...)` starts one; close it, or use it in a `with` block, to stop its servers.

    Only one thread may use it and its `deployment`.
    """

    def __init__(self, deployment: Deployment, spec: SpecConfig | None = None, acceptance: float | None = None) -> None:
        self.deployment, self.spec = deployment, spec or DEFAULT_SPEC
        self.loop = EngineLoop(deployment.fleet)
        self.loop.load.targets = deployment.sp
        self.loop.load.shared_spec = deployment.shared_spec if deployment.shares_forwards else None
        self._shared_forwards = SharedForwards(deployment.drafters[0], self.loop.load)
        self._verified_texts = TextTable()
        self._acceptance = acceptance  # the prior of `auto`; None: that of earlier runs, if any
        self.plans: Sequence[DeploymentPlan] = ()  # what `plan="auto"` chose from, the fastest first
        if self.algorithm == AUTO:
            self._controller  # noqa: B018  # made now, or the first request would wait for its predictions

    @classmethod
    def load(
        cls,
        config: EngineConfig | str | None = None,
        drafter: str | Sequence[str] | None = None,
        *,
        spec: SpecConfig | None = None,
        status: Status = no_status,
        **fields: Any,
    ) -> Self:
        """Load the models and start the servers.

        Either of `config` and `spec` can be given as keyword arguments, the fields of `EngineConfig` and
        `SpecConfig`: `Engine.load(target="builtin", sp=2, lookahead=5)`; a string is the target's name. What is
        left open, or `auto`, the engine measures and chooses. The default algorithm is `auto`, or `dsi` with a
        lookahead or another number of its own.
        `status` is told what is being done, as "measuring the models".
        """
        if isinstance(config, str):
            fields["target"], config = config, None
        if drafter is not None:
            fields["drafter"] = drafter
        config, spec = make_configs(config, spec, fields)
        from dsi.engine.build import build

        if config.plan is None:
            return cls(build(config, status), spec)
        from dsi.engine.profile_host import plan_engine

        status("measuring the models")
        config, spec, acceptance, plans = plan_engine(config)
        engine = cls(build(config, status), spec, acceptance)
        engine.plans = plans
        return engine

    if not TYPE_CHECKING:  # so that a misspelt name is still an error of types

        def __getattr__(self, name: str) -> Any:
            """Forward names of the last release: some changed, and those of the loop now belong to `loop`."""
            if name.startswith("_") or name == "loop":
                raise AttributeError(f"an engine has no attribute {name!r}")
            return getattr(self, OLD_NAMES[name]) if name in OLD_NAMES else getattr(self.loop, name)

    @property
    def fleet(self) -> Fleet:
        return self.loop.fleet

    @property
    def tokenizer(self) -> Tokenizer:
        return self.deployment.tokenizer

    @property
    def algorithm(self) -> str:
        """The algorithm of requests that name none."""
        return self.spec.algorithm

    @property
    def min_draft(self) -> int:
        """The minimum draft of DSI at its default lookahead."""
        if self.spec.min_draft is not None:
            return self.spec.min_draft
        return self.deployment.min_draft(self.spec.lookahead or self.deployment.lookahead("dsi"))

    @cached_property
    def _controller(self) -> AdaptiveController:
        """What `auto` learns of these models from all requests."""
        table = self.deployment.latency_table
        monitor = LatencyMonitor(table, MS_PER_SECOND)
        self.deployment.fleet.observe = monitor.observe
        prior = self._acceptance
        if prior is None:
            prior = read_profile(self.deployment.profile_key).get("acceptance", PRIOR_ACCEPTANCE)
        return AdaptiveController(table, self.deployment.drafters, prior, monitor)

    @cached_property
    def _unstreamed_controller(self) -> AdaptiveController:
        """The same for requests whose text the targets cannot stream, with another latency of plain decoding."""
        table, controller = self.deployment.unstreamed_latency_table, self._controller
        return AdaptiveController(table, controller.drafters, PRIOR_ACCEPTANCE, controller.latency_monitor)

    def _keep_acceptance(self) -> None:
        """Let the next run start from the acceptance rate that `auto` has learned of the first drafter."""
        learned = self._controller.acceptance[self.deployment.drafters[:1]]
        if self.deployment.profile_key and learned.verified >= MIN_LEARNED:
            keep_profile(self.deployment.profile_key, acceptance=learned.rate)

    def generate(self, prompt: str | Tokens, **options: Any) -> Completion:
        """Generate a whole text; the options are those of `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.completion

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
        rule: str | None = None,
        logprobs: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        min_tokens: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[str] = (),
        allowed_token_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> TextStream:
        """Start to generate; iterate over the result for the text as it is verified.

        `spec`, or its fields as keyword arguments, replaces the engine's. With the rule `match` a seed gives one
        text, whatever the algorithm; with `reject`, `block` and `specinfer` one for each algorithm and lookahead,
        all of them distributed exactly as the target's. The penalties are vLLM's: that of repetition counts the
        prompt and the text, those of presence and frequency only the text; without a repetition penalty, that of
        the target's generation configuration applies.
        """
        spec = make_spec(spec or self.spec, fields)
        sampling = Sampling(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            rule or spec.rule,
            logprobs=logprobs,
            repetition_penalty=self.deployment.repetition_penalty if repetition_penalty is None else repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_tokens=min_tokens,
            logit_bias=tuple((logit_bias or {}).items()),
            bad_words=tuple(tokens for word in bad_words for tokens in self.tokenizer.encode_word(word)),
            allowed_token_ids=None if allowed_token_ids is None else tuple(allowed_token_ids),
        )
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        request = self.make_request(tokens, max_new_tokens, spec, sampling, stop_token_ids, ignore_eos)
        return TextStream(self.loop, self.tokenizer, request, [stop] if isinstance(stop, str) else stop)

    def make_request(
        self,
        prompt: Tokens,
        max_new_tokens: int,
        spec: SpecConfig,
        sampling: Sampling,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Request:
        """Prepare a request for `loop.submit`, with no more new tokens than the target's context has room for.

        What `spec` leaves open is as in the engine's own, or else chosen by the deployment.
        """
        if sampling.min_tokens > max(0, max_new_tokens):
            raise ValueError(f"min_tokens {sampling.min_tokens}: there are {max_new_tokens} new tokens at most")
        eos, more = self.tokenizer.eos_token_ids, frozenset(stop_token_ids)
        if sampling.min_tokens:
            sampling = replace(sampling, end_token_ids=tuple(sorted(eos | more)))
        self.deployment.check_request(prompt, sampling)
        self.deployment.check_tokens(tuple(stop_token_ids))
        limit = self.deployment.limit_new_tokens(prompt, max_new_tokens)
        ends, contexts = more if ignore_eos else eos | more, self.deployment.drafter_contexts
        streams = self.deployment.can_stream(sampling)
        return Request(prompt, limit, self.policy(spec, streams, sampling), sampling, ends, contexts, streams)

    def score_request(self, prompt: Tokens, logprobs: int) -> ScoreRequest:
        """Prepare a request for the top log probabilities of each token of a prompt."""
        sampling = Sampling(logprobs=logprobs)
        self.deployment.check_request(prompt, sampling, new_tokens=0)
        return ScoreRequest(prompt, sampling)

    def verify_request(
        self, prompt: Tokens, num_positions: int, sampling: Sampling, prompt_length: int | None = None
    ) -> VerifyRequest:
        """Prepare a request for the target's token after each of the last `num_positions` prefixes of a prompt.

        Its first `prompt_length` tokens, by default those before all positions, are what the text began with: with
        the same of them, a text is taken for one that has grown, and only what is new is computed.
        """
        self.deployment.check_request(prompt, sampling, new_tokens=0)
        length = _fixed_length(len(prompt), num_positions, prompt_length, sampling)
        return VerifyRequest(self._verified_texts.sequence(prompt, length, sampling), num_positions, sampling)

    def policy(self, spec: SpecConfig, streams: bool = True, sampling: Sampling = GREEDY) -> Policy:
        """Build the policy of a request; beside other requests it speculates less.

        Where targets can stream texts, `streams` says whether this is one of them.
        """
        spec = fill_spec(spec, self.spec)
        deployment, load = self.deployment, self.loop.load
        shared = SpecConfig(lookahead=deployment.shared_lookahead, drafters=deployment.drafters)
        if spec.algorithm == AUTO and deployment.shares_forwards:
            tree = TREE_SIZES[-1] if deployment.drafts_trees(sampling) else 0
            return self._shared_forwards.policy(self._controller, tree)
        if spec.algorithm == AUTO:
            as_measured = streams or deployment.stream_ms is None
            return load_aware(self._controller if as_measured else self._unstreamed_controller, shared, load)
        if spec.algorithm == "nonsi" and deployment.stream_ms is not None:
            return streamed(load)
        spec = deployment.resolve(spec)
        policy = policy_for(spec)
        if spec.algorithm in ("pearl", "dsi") and deployment.shares_forwards:
            return self._shared_forwards.policy(policy, spec.tree)
        if spec.algorithm == "nonsi" and deployment.shares_forwards:
            return self._shared_forwards.plain(policy)
        if spec.algorithm != "dsi":
            return policy
        lookahead = min(spec.lookahead or 1, deployment.shared_lookahead)
        return load_aware(policy, replace(shared, lookahead=lookahead), load)

    def close(self) -> None:
        try:
            if "_controller" in vars(self):
                self._controller.latency_table.close()
                self._keep_acceptance()
        finally:
            self.fleet.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _fixed_length(length: int, num_positions: int, prompt_length: int | None, sampling: Sampling) -> int:
    """How many tokens of a text to verify are taken for its prompt, which bounds how many are taken one by one."""
    for name, number in {"num_positions": num_positions, "prompt_length": prompt_length}.items():
        if number is not None and not 1 <= number <= length:
            raise ValueError(f"{name} {number}: must be at least 1 and at most {length}, the prompt")
    fixed = prompt_length or length + 1 - num_positions
    grown = length - fixed
    if grown >= MAX_GROWTH and sampling.has_penalties:
        raise ValueError(f"prompt_length {fixed}: with penalties it must be followed by less than {MAX_GROWTH} tokens")
    return fixed + grown - grown % MAX_GROWTH  # without penalties, nothing depends on where the prompt ended
