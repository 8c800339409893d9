"""The replicas of the engine deployment as one EngineService. Knows Serve's handles and their errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from deployments.metrics import render
from deployments.wire import decode_chunk, from_answer
from engine.errors import EngineDead, ModelNotFound, Overloaded, Unavailable
from engine.request import AdapterRef, GenerateRequest, OutputDelta
from engine.wire import encode_ref, encode_request
from router.catalog import NO_REPLICA
from router.residency_router import BASE_ID

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
LOST = (RayActorError, EngineDead)  # what a replica that dies leaves of a request
CONTROL_TIMEOUT_S = 5.0  # statistics and health; loads have the engine's own deadline


class Replicas:
    """Calls to all replicas of the engine deployment."""

    def __init__(self, handle: Callable[[], Any], load_timeout_s: float) -> None:
        """`handle`: makes one of the engine deployment."""
        self._handle = handle
        self._load_timeout_s = load_timeout_s

    async def load_adapter(self, ref: AdapterRef) -> dict[str, Any]:
        """On every replica; the first one's report. A replica that starts now loads it by itself."""
        # the engines' own deadline first: it tells what was slow
        timeout_s = self._load_timeout_s + CONTROL_TIMEOUT_S
        results = await self._results("load_adapter", encode_ref(ref), timeout_s=timeout_s)
        if any(isinstance(result, TimeoutError) for result in results):
            raise Unavailable("a replica does not answer", retry_after_s=RETRY_AFTER_S)
        reports: list[dict[str, Any]] = [from_answer(answer) for answer in _answers(results)]
        return reports[0]

    async def unload_adapter(self, name: str) -> None:
        """A replica that does not have it has nothing to unload."""
        await self.broadcast("unload_adapter", name)

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        """On the replicas that have it. Raises the first one's error if none has, or if one has no room."""
        answers = await self.broadcast("pin_adapter", name, pinned)
        missing = [a for a in answers if "error" in a and a["error"]["code"] == ModelNotFound.default_code]
        for answer in answers:
            if answer not in missing or len(missing) == len(answers):
                from_answer(answer)

    async def broadcast(
        self, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """The answers of those that answer in time. Raises Unavailable if nobody does."""
        return _answers(await self._results(method, *args, timeout_s=timeout_s))

    async def _results(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Of each replica its answer, or the error that came instead: TimeoutError if nothing came."""
        return await asyncio.gather(*await self._calls(method, *args, timeout_s=timeout_s))

    async def _calls(self, method: str, *args: Any, timeout_s: float) -> list[Coroutine[Any, Any, Any]]:
        """Raises Unavailable if there is no replica."""
        response = self._handle().broadcast(method, *args)
        try:
            async with asyncio.timeout(timeout_s):
                # its public methods tell all answers or none: one replica that hangs would hide the others
                sent = await response._fetch_replica_results_async()
        except (TimeoutError, RayServeException) as error:
            is_none = isinstance(error, DeploymentUnavailableError)
            raise _no_replica(NO_REPLICA if is_none else None) from error
        return [_result(one, timeout_s) for one in sent]


class FleetService(Replicas):
    def __init__(self, handle: Any, model_name: str, max_model_len: int, load_timeout_s: float) -> None:
        """`handle`: of the engine deployment."""
        super().__init__(lambda: handle, load_timeout_s)
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.whole = WholeAnswers(self._stream)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[OutputDelta], None]:
        """A replica that dies before the first delta is replaced by another one, once, if there is time."""
        began = time.monotonic()
        started = False
        for is_last in (False, True):
            try:
                async with aclosing(self._stream(request)) as stream:
                    async for deltas in stream:
                        started = True
                        yield deltas
                return
            except LOST as error:
                request = _again(request, time.monotonic() - began, error, is_last or started)

    async def metrics_text(self) -> str:
        """Of a fleet without a replica too: that is when somebody looks."""
        replicas, num_silent = await self._told("stats")
        # a thousand adapters take 70 ms, in which no stream of this process would move
        return await asyncio.to_thread(render, replicas, num_silent=num_silent)

    async def stats(self) -> dict[str, Any]:
        replicas, _ = await self._told("stats", True)
        return {"replicas": replicas}

    async def _told(self, method: str, *args: Any) -> tuple[list[dict[str, Any]], int]:
        """The answers that came, and how many did not. No replica is no failure here."""
        try:
            results = await self._results(method, *args, timeout_s=CONTROL_TIMEOUT_S)
        except Unavailable:
            return [], 0
        answers = _came(results)
        return answers, len(results) - len(answers)

    async def check_health(self) -> None:
        """Returns as soon as one answers: a probe waits for a second only."""
        calls = await self._calls("facts", timeout_s=CONTROL_TIMEOUT_S)
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            for task in asyncio.as_completed(tasks):
                if not isinstance(await task, Exception):
                    return
        finally:
            for one in tasks:
                one.cancel()
        raise _no_replica()

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[list[OutputDelta], None]:
        unfinished = request.params.n
        response = (
            self._handle()
            .options(
                method_name="generate",
                stream=True,
                multiplexed_model_id=request.adapter.name if request.adapter else BASE_ID,
            )
            .remote(encode_request(request), route="")
        )
        try:
            async for chunk in response:
                deltas = decode_chunk(chunk)
                unfinished -= sum(delta.finish_reason is not None for delta in deltas)
                yield deltas
        except (BackPressureError, DeploymentUnavailableError) as error:
            unfinished = 0  # it never began; to cancel it would raise the error once more
            if isinstance(error, BackPressureError):
                raise Overloaded("all replicas are busy", retry_after_s=RETRY_AFTER_S) from error
            raise _no_replica() from error
        except RayActorError:
            if unfinished:  # else its answer is whole
                raise
        finally:
            if unfinished:
                _cancel(response)
        if unfinished:
            raise EngineDead("the replica's answer has no end", retry_after_s=RETRY_AFTER_S)


class WholeAnswers:
    """A TokenSource that gives the deltas of an answer when all of them are there."""

    def __init__(self, stream: Callable[[GenerateRequest], AsyncGenerator[list[OutputDelta], None]]) -> None:
        """`stream`: one replica's answer."""
        self._stream = stream

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[OutputDelta], None]:
        """A replica that dies is replaced by another one, once, if the request's time has not passed.

        That one generates all choices again: what the dead one had given of them is dropped.
        """
        began = time.monotonic()
        for is_last in (False, True):
            held: list[list[OutputDelta]] = []
            try:
                async with aclosing(self._stream(request)) as stream:
                    async for deltas in stream:
                        if not held:  # who counts waiting requests knows their first token by it
                            yield []
                        held.append(deltas)
            except LOST as error:
                request = _again(request, time.monotonic() - began, error, is_last)
            else:
                for deltas in held:
                    yield deltas
                return


def _again(request: GenerateRequest, seconds: float, error: Exception, is_over: bool) -> GenerateRequest:
    """What another replica is asked in the place of one that was lost after so many seconds.

    Raises EngineDead if none is asked, or a first token would be of no use any more.
    """
    logger.warning("request %s lost its replica: %s", request.request_id, type(error).__name__)
    left = None if request.timeout_s is None else request.timeout_s - seconds
    if is_over or (left is not None and left <= 0):
        raise EngineDead("the replica has ended", retry_after_s=RETRY_AFTER_S) from error
    return replace(request, timeout_s=left)


def _cancel(response: Any) -> None:
    """Serve's own does not reach a call that was sent in the very moment in which its caller left.

    The replica would compute it to its end.
    """
    is_known = response._replica_result is not None
    response.cancel()
    sent = response._replica_result_future
    if not is_known and sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()


async def _result(sent: Any, timeout_s: float) -> Any:
    """`sent`: Serve's ReplicaResult. Returns what it raises."""
    try:
        async with asyncio.timeout(timeout_s):
            return await sent.get_async()
    except Exception as error:
        return error


def _came(results: Sequence[Any]) -> list[dict[str, Any]]:
    return [result for result in results if not isinstance(result, Exception)]


def _answers(results: Sequence[Any]) -> list[dict[str, Any]]:
    answers = _came(results)
    if not answers:
        raise _no_replica() from next(iter(results), None)
    return answers


def _no_replica(code: str | None = None) -> Unavailable:
    return Unavailable("no replica is available", code=code, retry_after_s=RETRY_AFTER_S)
