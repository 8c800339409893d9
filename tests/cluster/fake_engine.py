"""An EngineClient without an engine: same calls, chosen delays, adapter slots that can be watched.

Its model is a JSON object: {"token_s": seconds a token, "load_s": seconds a load}, else both are 0.
The text of the first token is the process id. A prompt may end with one of the magic tokens below.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from engine.config import EngineConfig
from engine.errors import AdapterRefused, EngineDead, ModelNotFound, Overloaded
from engine.request import AdapterRef, GenerateRequest, OutputDelta
from engine.stats import BASE

DIE_AT_START = 900_001  # the engine dies before the first token, once per cluster
DIE_AT_THIRD = 900_003
OVERLOADED = 900_004
NO_END = 900_005  # the stream ends without a finish_reason
DIE_ONCE_AT_THIRD = 900_006  # once per cluster


class FakeEngineClient:
    def __init__(self, config: EngineConfig) -> None:
        delays = json.loads(config.model) if config.model.startswith("{") else {}
        self._token_s = delays.get("token_s", 0.0)
        self._load_s = delays.get("load_s", 0.0)
        self._config = config
        self._seats = asyncio.Semaphore(config.max_num_seqs)
        self._dead = asyncio.Event()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._resident: dict[str, str] = {}  # name -> uri, least recently used first
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self.num_loads = 0
        self.num_hints = 0
        self.num_aborted = 0
        self.facts = SimpleNamespace(max_model_len=config.max_model_len or 256)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    @property
    def is_alive(self) -> bool:
        return not self._dead.is_set()

    async def wait_for_death(self) -> None:
        await self._dead.wait()

    async def generate(
        self, request: GenerateRequest, interval_s: float = 0.0
    ) -> AsyncGenerator[list[OutputDelta], None]:
        """Each token by itself."""
        name = request.adapter.name if request.adapter else BASE
        magic = request.prompt_token_ids[-1]
        if magic == OVERLOADED:
            raise Overloaded("full", retry_after_s=3.0)
        if magic == DIE_AT_START and await self._first_time(request):
            await self._die()
        self._waiting[name] += 1
        try:
            if request.adapter is not None:
                await self._make_resident(request.adapter)
            await self._seats.acquire()
        finally:
            self._waiting[name] -= 1
        self._running[name] += 1
        total = request.params.max_tokens or 1
        count = 0
        try:
            for count in range(1, total + 1):
                await asyncio.sleep(self._token_s)
                if count == 3 and (
                    magic == DIE_AT_THIRD or (magic == DIE_ONCE_AT_THIRD and await self._first_time(request))
                ):
                    await self._die()
                is_last = count == total and magic != NO_END
                yield [
                    _delta(request, i, str(os.getpid()) if count == 1 else " x", count, is_last)
                    for i in range(request.params.n)
                ]
        finally:
            self.num_aborted += count < total
            self._running[name] -= 1
            self._seats.release()

    async def load_adapter(self, ref: AdapterRef) -> dict[str, Any]:
        await self._make_resident(ref)
        return {"status": "ok", "adapter": ref.name, "pid": os.getpid()}

    async def unload_adapter(self, name: str) -> None:
        if self._resident.pop(name, None) is None:
            raise ModelNotFound(f"no adapter {name!r}")

    async def prefetch(self, ref: AdapterRef) -> None:
        if not self.is_alive:
            raise EngineDead("the engine process ended")
        self.num_hints += 1
        if ref.name not in self._resident and ref.name not in self._loading:
            self._loading[ref.name] = load = asyncio.create_task(self._load(ref))
            load.add_done_callback(lambda done: done.exception())  # nobody hears of it

    async def stats(self) -> dict[str, Any]:
        names = {*self._resident, *self._loading, *self._running, *self._waiting} - {BASE}
        return {
            "running": self._running.total(),
            "waiting": self._waiting.total(),
            "max_num_seqs": self._config.max_num_seqs,
            "slots": {"total": self._config.max_adapters, "used": len(self._resident)},
            "num_loads": self.num_loads,
            "num_hints": self.num_hints,
            "num_aborted": self.num_aborted,
            "pid": os.getpid(),
            "adapters": {name: self._entry(name) for name in sorted(names)},
        }

    def _entry(self, name: str) -> dict[str, Any]:
        tier = "hbm" if name in self._resident else "loading" if name in self._loading else "source"
        return {"tier": tier, "running": self._running[name], "waiting": self._waiting[name], "pinned": False}

    async def _make_resident(self, ref: AdapterRef) -> None:
        if self._resident.get(ref.name) != ref.uri:
            if ref.name not in self._loading:
                self._loading[ref.name] = asyncio.create_task(self._load(ref))
            await asyncio.shield(self._loading[ref.name])
        self._resident[ref.name] = self._resident.pop(ref.name, ref.uri)

    async def _load(self, ref: AdapterRef) -> None:
        try:
            await asyncio.sleep(self._load_s)
            if ref.uri.startswith("refused:"):
                raise AdapterRefused("use_dora is not supported", param="use_dora")
            self.num_loads += 1
            while len(self._resident) >= self._config.max_adapters:
                idle = next((n for n in self._resident if self._running[n] + self._waiting[n] == 0), None)
                if idle is None:
                    await asyncio.sleep(0.01)
                else:
                    del self._resident[idle]
            self._resident[ref.name] = ref.uri
        finally:
            del self._loading[ref.name]

    async def _first_time(self, request: GenerateRequest) -> bool:
        # the second replica must survive the retried request: the marker file tells it
        marker = request.request_id
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    async def _die(self) -> None:
        self._dead.set()
        await asyncio.sleep(0)
        raise EngineDead("the engine process ended")


def _delta(request: GenerateRequest, index: int, text: str, count: int, is_last: bool) -> OutputDelta:
    return OutputDelta(
        index=index,
        text=text,
        token_ids=(count,),
        logprobs=None,
        finish_reason="length" if is_last else None,
        stop_reason=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=count,
    )
