"""An engine in a process of its own, for asyncio callers. Knows nothing of Ray or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.choices import Choice, split_choices
from engine.config import EngineConfig
from engine.errors import EngineDead, LorafleetError
from engine.events import CallEvent, TokenEvent
from engine.paced import Paced
from engine.request import AdapterRef, GenerateRequest, OutputDelta
from engine.snapshot import apply_news
from engine.tokenizer import Tokenizer
from engine.wire import HEADER, decode_event, encode_choices, encode_frame, encode_ref

STOP_TIMEOUT_S = 5.0
CHECK_S = 1.0  # between two looks at whether the process lives

logger = logging.getLogger(__name__)

# idle OpenMP threads sleep: where other processes use the cores, spinning made a step up to 35 times slower
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the process told when it was ready."""

    max_model_len: int
    num_pages: int
    page_tokens: int
    page_bytes: int
    vocab_size: int


class EngineClient:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._streams: dict[str, _Stream] = {}  # by id of each choice that the engine runs
        self._calls: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = map(str, itertools.count())
        self._request_numbers = itertools.count()
        self._stats: dict[str, Any] = {}
        self._death: EngineDead | None = None
        self._process: asyncio.subprocess.Process
        self._writer: asyncio.StreamWriter
        self._has_spoken = False  # since the last look
        self._reading: asyncio.Task[None]
        self._watching: asyncio.Task[None]
        self.tokenizer: Tokenizer
        self.facts: EngineFacts

    async def start(self) -> None:
        """Returns when the engine can serve.

        Raises InvalidRequest if model or configuration cannot be served, EngineDead if the process ended,
        Unavailable if another rank of its group did.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "engine.process", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env={**_ENVIRONMENT, **os.environ},
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(asdict(self._config))
        tokenizer = asyncio.ensure_future(asyncio.to_thread(Tokenizer.from_pretrained, self._config.model))
        try:
            # first, because the engine tells best what is wrong with a model
            self.facts = await _read_facts(reader)
            self.tokenizer = await tokenizer
        except BaseException:
            await self._end_process()
            await asyncio.gather(tokenizer, return_exceptions=True)
            raise
        self._reading = asyncio.create_task(self._read(reader))
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Ends the process; what was running ends with EngineDead."""
        self._watching.cancel()
        await self._end_process()
        await self._reading

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._death is None

    async def wait_for_death(self) -> None:
        await asyncio.shield(self._reading)

    async def generate(
        self, request: GenerateRequest, interval_s: float = 0.0
    ) -> AsyncGenerator[list[OutputDelta]]:
        """Deltas of all choices: as they come, or with `interval_s` between pieces, except at begin and end.

        Raises LorafleetError; closing the generator aborts the rest.
        """
        self._check_alive()
        # what comes late of one that was closed must not be taken for another one's, whatever id that has
        request = replace(request, request_id=f"{request.request_id}@{next(self._request_numbers)}")
        choices = {c.request.request_id: c for c in split_choices(request, self.tokenizer)}
        stream = _Stream(choices, Paced(interval_s))
        self._streams |= dict.fromkeys(choices, stream)
        self._send(["add", *encode_choices([choice.request for choice in choices.values()])])
        try:
            async with contextlib.aclosing(stream.deltas.pieces()) as pieces:
                async for deltas in pieces:
                    yield deltas
        finally:
            for choice_id in stream.choices:
                self._drop(choice_id)

    async def load_adapter(self, ref: AdapterRef) -> dict[str, Any]:
        """The load report. Raises AdapterRefused, ModelNotFound, AccessDenied or Unavailable."""
        return await self._call("load", encode_ref(ref))

    async def prefetch(self, ref: AdapterRef) -> None:
        """A request for it is on its way. Nobody hears how that ends; raises EngineDead."""
        self._check_alive()
        self._send(["prefetch", encode_ref(ref)])

    async def unload_adapter(self, name: str) -> None:
        """Raises ModelNotFound."""
        await self._call("unload", name)

    async def pin_adapter(self, name: str) -> None:
        """Never evict what is loaded under this name. Raises ModelNotFound or Conflict."""
        await self._call("pin", name)

    async def unpin_adapter(self, name: str) -> None:
        await self._call("unpin", name)

    async def stats(self) -> dict[str, Any]:
        """As the engine told them last: at most 0.1 s old while it works, exact when it is idle."""
        self._check_alive()
        return self._stats

    async def _call(self, name: str, argument: Any) -> dict[str, Any]:
        self._check_alive()
        call_id = next(self._call_ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send([name, call_id, argument])
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._dispatch(await _read_message(reader))
        except (EOFError, OSError):
            self._die(EngineDead("the engine process ended", retry_after_s=1.0))

    async def _watch(self) -> None:
        """End a process that hangs: its death is noticed at once.

        Looks are counted, not seconds: if this process was held up itself, that is no fault of the other one.
        """
        silent_looks = 0
        while silent_looks * CHECK_S < self._config.heartbeat_timeout_s:
            self._has_spoken = False
            await asyncio.sleep(CHECK_S)
            silent_looks = 0 if self._has_spoken else silent_looks + 1
        if self.is_alive:
            self._kill(f"no sign of life for {self._config.heartbeat_timeout_s:g} s")

    def _kill(self, reason: str) -> None:
        logger.error("the engine process is ended: %s", reason)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _dispatch(self, message: dict[str, Any]) -> None:
        self._has_spoken = True
        if "beat" in message:
            if message["beat"] > self._config.step_timeout_s:
                self._kill(f"a step takes longer than {self._config.step_timeout_s:g} s")
            return
        if "stats" in message:
            self._stats = apply_news(self._stats, message["stats"])
            return
        for item in message["events"]:
            event = decode_event(item)
            if isinstance(event, TokenEvent):
                self._feed(event)
            else:
                self._answer(event)

    def _feed(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return  # a token under way when a stop string ended the choice, or its request was closed
        if event.finish_reason or event.error:
            del self._streams[event.request_id]  # nothing to abort any more
        if not stream.feed(event):
            self._drop(event.request_id)

    def _answer(self, event: CallEvent) -> None:
        future = self._calls.get(event.call_id)
        if future is None or future.done():
            return
        if event.error is not None:
            future.set_exception(event.error)
        else:
            future.set_result(event.result or {})

    def _drop(self, choice_id: str) -> None:
        if self._streams.pop(choice_id, None) is not None and self.is_alive:
            self._send(["abort", choice_id])

    def _die(self, error: EngineDead) -> None:
        self._death = error
        for stream in set(self._streams.values()):
            stream.deltas.end(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def _end_process(self) -> None:
        self._writer.close()  # which the process takes as the end
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _send(self, message: Any) -> None:
        self._writer.write(encode_frame(message))


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    choices: dict[str, Choice]  # that have not ended, by id
    deltas: Paced[OutputDelta]

    def feed(self, event: TokenEvent) -> bool:
        """Whether its choice goes on. What is wrong with one ends the request, and harms no other."""
        choice = self.choices[event.request_id]
        try:
            delta = choice.feed(event)
        except Exception as error:
            del self.choices[event.request_id]
            self.deltas.end(error)
            return False
        if delta is not None:
            self.deltas.put(delta)
        if choice.is_finished:
            del self.choices[event.request_id]
            if not self.choices:
                self.deltas.end()
        return not choice.is_finished


async def _read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    message: dict[str, Any] = json.loads(await reader.readexactly(length))
    return message


async def _read_facts(reader: asyncio.StreamReader) -> EngineFacts:
    try:
        message = await _read_message(reader)
    except (EOFError, OSError):  # the latter if it had not read its configuration
        raise EngineDead("the engine process ended while it started") from None
    if "failed" in message:
        raise LorafleetError.from_dict(message["failed"])
    return EngineFacts(**message["ready"])
