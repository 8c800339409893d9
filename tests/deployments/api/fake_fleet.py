"""A scripted engine service, a catalog in a dictionary, a byte tokenizer, and a client that needs no port."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx2
from fastapi import FastAPI

from deployments.api.build import build_api
from deployments.api.settings import ApiSettings
from deployments.service import AdapterRecord, CanaryRecord, CatalogFacts
from engine.errors import Conflict, ModelNotFound
from engine.request import AdapterRef, FinishReason, GenerateRequest, OutputDelta, TokenLogprob

if TYPE_CHECKING:
    from deployments.spans import Tracing

BOS, EOS = 256, 257
BASE = "acme/base"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Step = list[OutputDelta] | Exception | asyncio.Event
Script = Callable[[GenerateRequest], Iterable[Step]]


class FakeTokenizer:
    """One token per byte, and two special ones."""

    chat_template: str | None = TEMPLATE

    def __init__(self, adds_bos: bool = False) -> None:
        self._adds_bos = adds_bos

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        return {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self._adds_bos and add_special_tokens) + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [token_id for token_id in token_ids if token_id < BOS or not skip_special_tokens]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def knows(self, token_id: int) -> bool:
        return token_id <= EOS

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])


class FakeService:
    model_name = BASE
    max_model_len = 100

    def __init__(self) -> None:
        self.script: Script = spell("ok")
        self.requests: list[GenerateRequest] = []
        self.num_running = 0
        self.health: Exception | None = None
        self.known: set[str] = set()
        self.pinned: set[str] = set()
        self.replicas: list[dict[str, Any]] = []  # their statistics

    @property
    def whole(self) -> FakeService:
        return self

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[OutputDelta]]:
        self.requests.append(request)
        self.num_running += 1
        try:
            for step in self.script(request):
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except BaseException:
            await asyncio.sleep(0)  # a real one tells its engine, which must not be cut short
            self.num_running -= 1
            raise
        self.num_running -= 1

    async def load_adapter(self, ref: AdapterRef) -> dict[str, Any]:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        if name not in self.known:
            raise ModelNotFound("no such adapter")
        (self.pinned.add if pinned else self.pinned.discard)(name)

    async def metrics_text(self) -> str:
        return "lorafleet_up 1\n"

    async def stats(self) -> dict[str, Any]:
        return {"replicas": self.replicas}

    async def check_health(self) -> None:
        if self.health is not None:
            raise self.health


class FakeCatalog:
    def __init__(self) -> None:
        self.records: dict[str, AdapterRecord] = {}
        self.resolved: list[str] = []
        self.lists: list[int] = []  # how many were asked for
        self.failure: Exception | None = None

    def add(self, name: str, chat_template: str | None = None) -> None:
        self.records[name] = AdapterRecord(
            AdapterRef(name, f"/adapters/{name}"), chat_template, f"root/{name}"
        )

    async def resolve(self, name: str) -> AdapterRecord:
        self.resolved.append(name)
        if self.failure is not None:
            raise self.failure
        if name not in self.records:
            raise ModelNotFound("not in the catalog")
        return self.records[name]

    async def list(self, prefix: str, after: str, limit: int) -> list[AdapterRecord]:
        self.lists.append(limit)
        names = sorted(name for name in self.records if name.startswith(prefix) and name > after)
        return [self.records[name] for name in names[:limit]]

    def facts(self) -> CatalogFacts:
        return CatalogFacts("file", Counter(record.state for record in self.records.values()))

    async def load(self, name: str, uri: str, *, replace: bool) -> None:
        if self.failure is not None:
            raise self.failure
        if name in self.records and not replace:
            raise Conflict("taken")
        self.records[name] = AdapterRecord(AdapterRef(name, uri), None, uri)

    async def load_canary(self, name: str, uri: str, weight: float) -> None:
        if name not in self.records:
            raise ModelNotFound("not in the catalog", param="lora_name")
        old = self.records[name]
        canary = CanaryRecord(AdapterRecord(AdapterRef(f"{name}@canary", uri), None, uri), weight)
        self.records[name] = replace(old, canary=canary if weight else None)

    async def unload(self, name: str) -> None:
        if name not in self.records:
            raise ModelNotFound("not in the catalog")
        del self.records[name]


@dataclass(slots=True)
class FakeFleet:
    service: FakeService = field(default_factory=FakeService)
    catalog: FakeCatalog = field(default_factory=FakeCatalog)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    tracing: Tracing | None = None

    def app(self, **settings: Any) -> FastAPI:
        given = {"model_names": (BASE,), "max_model_len": FakeService.max_model_len, "created": 7, **settings}
        return build_api(self.service, self.catalog, self.tokenizer, ApiSettings(**given), self.tracing)

    @asynccontextmanager
    async def client(self, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        app = self.app(**settings)
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://fleet") as client,
        ):
            yield client


def delta(
    request: GenerateRequest,
    text: str,
    *,
    index: int = 0,
    finish: FinishReason | None = None,
    num_output_tokens: int = 1,
    stop_reason: str | int | None = None,
    num_cached_tokens: int = 0,
) -> OutputDelta:
    token_ids = tuple(text.encode())
    asked = request.params.logprobs
    logprobs = None if asked is None else tuple(_logprob(token_id, asked) for token_id in token_ids)
    return OutputDelta(
        index, text, token_ids, logprobs, finish, stop_reason,
        len(request.prompt_token_ids), num_cached_tokens, num_output_tokens,
    )  # fmt: skip


def spell(*texts: str, finish: FinishReason = "stop") -> Script:
    """Every choice says the same texts, one a step; the last one ends it."""

    def script(request: GenerateRequest) -> Iterator[Step]:
        for number, text in enumerate(texts, start=1):
            for index in range(request.params.n):
                end = finish if number == len(texts) else None
                yield [delta(request, text, index=index, finish=end, num_output_tokens=number)]

    return script


def steps(*script: Step) -> Script:
    return lambda request: script


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    """The chosen token is the best one but for a rival, which comes first."""
    return TokenLogprob(token_id, -1.0, ((ord("!"), -0.5), (token_id, -1.0))[:num_top])
