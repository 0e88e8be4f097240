"""`POST /v1/verify`: token ids in, the target's token after each of the last prefixes out.

The path of a target's forward under somebody else's speculation: nothing is tokenized, and one message each way
passes between the event loop and the engine thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.engine.deployment import ContextLengthError
from dsi.server.engine_thread import EngineOutput, VerificationJob
from dsi.server.errors import ApiError, context_length_exceeded, deadline_exceeded, engine_failed, shutting_down
from dsi.server.parameters import check_unknown, unsupported
from dsi.server.schema import VerifyBody
from dsi.server.service import EngineInfo, Service

log = logging.getLogger("dsi.server")


async def verify(service: Service, body: VerifyBody, client: int = 0) -> Tokens:
    """The target's tokens, or an `ApiError`; cancelling this cancels the forward."""
    began, outcome = time.perf_counter(), "error"
    done: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
    job = make_job(service, body, done, client)
    service.engine_thread.post(job)
    try:
        async with asyncio.timeout(service.limits.seconds):
            tokens = answer(await done)
        outcome = "ok"
    except TimeoutError:
        outcome = "deadline"
        raise deadline_exceeded(service.limits.seconds) from None
    except asyncio.CancelledError:
        outcome = "disconnected"
        raise
    finally:
        if outcome in ("deadline", "disconnected"):
            service.engine_thread.cancel([job])
        service.metrics.count_verification(body.num_positions, time.perf_counter() - began, outcome)
    return tokens


def make_job(service: Service, body: VerifyBody, done: asyncio.Future[EngineOutput], client: int) -> VerificationJob:
    """Check a body, and have `done` receive what comes of it."""
    check_unknown(body.model_extra or {})
    service.check_model(body.model)
    check_prompt(service.info, body)
    deliver = partial(service.inbox().put, partial(_set_result, done))
    return VerificationJob(
        body.prompt, body.num_positions, body.prompt_length or None, sampling(service.info, body), deliver, client
    )


def check_prompt(info: EngineInfo, body: VerifyBody) -> None:
    prompt, length = body.prompt, len(body.prompt)
    if info.context and length > info.context:
        raise context_length_exceeded(ContextLengthError(info.context, length), "prompt")
    if max(prompt) >= info.vocab_size:
        message = f"token {max(prompt)}: the model's tokens are 0 to {info.vocab_size - 1}"
        raise ApiError(400, message, param="prompt")
    for name in ("num_positions", "prompt_length"):
        if (getattr(body, name) or 1) > length:
            message = f"{name} {getattr(body, name)}: the prompt has {length} tokens"
            raise ApiError(400, message, param=name)


def sampling(info: EngineInfo, body: VerifyBody) -> Sampling:
    penalty = info.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
    made = Sampling(
        body.temperature,
        max(0, body.top_k),  # -1: all
        body.top_p,
        body.min_p,
        body.seed,
        repetition_penalty=penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
    )
    if info.on_devices and made.has_penalties:
        raise unsupported(made.penalties[0])
    return made


def answer(output: EngineOutput) -> Tokens:
    if output.refusal:
        raise output.refusal
    if output.error:
        log.error("engine failed", extra={"why": output.error})
        raise engine_failed()
    if output.finish_reason == "cancelled":
        raise shutting_down()
    return tuple(output.tokens)


def _set_result(done: asyncio.Future[EngineOutput], output: EngineOutput) -> None:
    if not done.done():
        done.set_result(output)
