"""The replicas of the engine deployment as one EngineService. Knows Serve's handles and their errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from deployments.metrics import render
from deployments.wire import decode_chunk, from_answer
from engine.errors import EngineDead, ModelNotFound, Overloaded, Unavailable
from engine.request import AdapterRef, GenerateRequest, OutputDelta
from engine.wire import encode_ref, encode_request
from router.residency_router import BASE_ID

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
CONTROL_TIMEOUT_S = 5.0  # statistics and health; loads have the engine's own deadline


class Replicas:
    """Calls to all replicas of the engine deployment."""

    def __init__(self, handle: Callable[[], Any], load_timeout_s: float) -> None:
        """`handle`: makes one of the engine deployment."""
        self._handle = handle
        self._load_timeout_s = load_timeout_s

    async def load_adapter(self, ref: AdapterRef) -> dict[str, Any]:
        """On every replica; the first one's report. A replica that starts now loads it by itself."""
        answers = await self.broadcast("load_adapter", encode_ref(ref), timeout_s=self._load_timeout_s)
        reports: list[dict[str, Any]] = [from_answer(answer) for answer in answers]
        return reports[0]

    async def unload_adapter(self, name: str) -> None:
        """A replica that does not have it has nothing to unload."""
        await self.broadcast("unload_adapter", name, timeout_s=self._load_timeout_s)

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
        """The answers of those that answer. Raises Unavailable if nobody does."""
        try:
            async with asyncio.timeout(timeout_s):
                results = await self._handle().broadcast(method, *args).results_async(return_exceptions=True)
        except (TimeoutError, RayServeException) as error:
            raise Unavailable("no replica is available", retry_after_s=RETRY_AFTER_S) from error
        answers = [result for result in results if not isinstance(result, Exception)]
        if not answers:
            raise Unavailable("no replica is available", retry_after_s=RETRY_AFTER_S) from next(
                iter(results), None
            )
        return answers


class FleetService(Replicas):
    def __init__(self, handle: Any, model_name: str, max_model_len: int, load_timeout_s: float) -> None:
        """`handle`: of the engine deployment."""
        super().__init__(lambda: handle, load_timeout_s)
        self.model_name = model_name
        self.max_model_len = max_model_len

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[OutputDelta], None]:
        """A replica that dies before the first delta is replaced by another one, once."""
        started = False
        for is_last in (False, True):
            try:
                async with aclosing(self._stream(request)) as stream:
                    async for deltas in stream:
                        started = True
                        yield deltas
                return
            except (RayActorError, EngineDead) as error:
                logger.warning("request %s lost its replica: %s", request.request_id, type(error).__name__)
                if started or is_last:
                    raise EngineDead("the replica has ended", retry_after_s=RETRY_AFTER_S) from error

    async def metrics_text(self) -> str:
        # a thousand adapters take 70 ms, in which no stream of this process would move
        return await asyncio.to_thread(render, await self.broadcast("stats"))

    async def stats(self) -> dict[str, Any]:
        return {"replicas": await self.broadcast("stats", True)}

    async def check_health(self) -> None:
        await self.broadcast("facts")

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
            raise Unavailable("no replica is available", retry_after_s=RETRY_AFTER_S) from error
        finally:
            if unfinished:
                response.cancel()
        if unfinished:
            raise EngineDead("the replica's answer has no end", retry_after_s=RETRY_AFTER_S)
