"""Serve's errors become ours; a lost replica costs at most one retry and never a token twice.

Of answers that are shown whole see `test_whole_answers.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponseGenerator

from deployments.fleet_service import FleetService
from deployments.wire import encode_deltas, encode_error
from engine.errors import (
    AdapterRefused,
    Conflict,
    EngineDead,
    LorafleetError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from engine.request import AdapterRef, GenerateRequest, OutputDelta
from engine.sampling_params import SamplingParams
from router.catalog import NO_REPLICA

SQL = AdapterRef("sql", "s3://b/sql", "v1")
REQUEST = GenerateRequest("id", (1, 2), SamplingParams(), SQL)
DIED = (ActorDiedError(), ActorUnavailableError("gone", None))
NO_DEPLOYMENT = DeploymentUnavailableError(DeploymentID("engine", "app"))


def delta(text: str, finish_reason: Any = None, index: int = 0) -> OutputDelta:
    return OutputDelta(index, text, (1,), None, finish_reason, None, 2, 0, 1)


FIRST, LAST = encode_deltas([delta("a")]), encode_deltas([delta("b", "stop")])


class Stream:
    def __init__(self, items: list[bytes | Exception]) -> None:
        self._items = items
        self._replica_result = self  # as in Serve's responses
        self._replica_result_future: asyncio.Future[Any] | None = None
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for item in self._items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        for item in self._items:
            if isinstance(item, (BackPressureError, DeploymentUnavailableError)):
                raise item  # as Serve does for a call that found no replica
        self.is_cancelled = True


HANGS = "a replica that hangs"


class Sent:
    """A call to one replica."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is HANGS:
            await asyncio.sleep(60)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Broadcast:
    def __init__(self, answers: list[Any] | Exception) -> None:
        self._answers = answers

    async def _fetch_replica_results_async(self) -> list[Sent]:
        if isinstance(self._answers, Exception):
            raise self._answers
        return [Sent(answer) for answer in self._answers]


class Handle:
    """Plays one stream a call, in order."""

    def __init__(
        self, *streams: list[bytes | Exception], answers: list[Any] | Exception = NO_DEPLOYMENT
    ) -> None:
        self.streams = [Stream(items) for items in streams]
        self.answers = answers
        self.calls: list[dict[str, Any]] = []
        self.broadcasts: list[tuple[Any, ...]] = []
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> Handle:
        self._options = options
        return self

    def remote(self, request: dict[str, Any], *, route: str) -> Stream:
        self.calls.append({**self._options, "request": request, "route": route})
        return self.streams[len(self.calls) - 1]

    def broadcast(self, *args: Any) -> Broadcast:
        self.broadcasts.append(args)
        return Broadcast(self.answers)


def test_a_call_that_is_sent_as_its_caller_leaves_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Serve's own response: its `cancel` does not know yet where the call went."""

    async def main() -> None:
        sent = Stream([])
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        response = DeploymentResponseGenerator(future, None, False)
        handle = Handle()
        monkeypatch.setattr(handle, "remote", lambda *args, **kwargs: response)
        stream = service(handle).generate(REQUEST)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        future.set_result(sent)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        assert sent.is_cancelled

    asyncio.run(main())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.fleet_service.CONTROL_TIMEOUT_S", 0.1)


def service(handle: Handle) -> FleetService:
    return FleetService(handle, "base", 256, load_timeout_s=1.0)


async def collect(handle: Handle, request: GenerateRequest, seen: list[str]) -> None:
    async for deltas in service(handle).generate(request):
        seen.extend(d.text for d in deltas)


def play(handle: Handle, request: GenerateRequest = REQUEST) -> tuple[list[str], LorafleetError | None]:
    """The texts that came, and the error that ended them."""
    seen: list[str] = []
    try:
        asyncio.run(collect(handle, request, seen))
    except LorafleetError as error:
        return seen, error
    return seen, None


def test_a_stream_passes_and_carries_the_adapters_id() -> None:
    handle = Handle([FIRST, LAST])
    assert play(handle) == (["a", "b"], None)
    assert handle.calls[0]["multiplexed_model_id"] == "sql"
    assert (handle.calls[0]["method_name"], handle.calls[0]["stream"]) == ("generate", True)
    assert handle.calls[0]["request"]["adapter"] == {"name": "sql", "uri": "s3://b/sql", "version": "v1"}
    assert not handle.streams[0].is_cancelled


def test_a_base_request_has_an_id_too() -> None:
    """A call without one would take another request's replica."""
    handle = Handle([LAST])
    play(handle, GenerateRequest("id", (1,), SamplingParams()))
    assert handle.calls[0]["multiplexed_model_id"] == "_base"


@pytest.mark.parametrize("death", [*DIED, encode_error(EngineDead("ended"))])
def test_a_replica_lost_before_the_first_token_is_replaced_once(death: Any) -> None:
    """FR-65."""
    assert play(Handle([death], [FIRST, LAST])) == (["a", "b"], None)
    handle = Handle([death], [death], [LAST])
    seen, error = play(handle)
    assert (seen, type(error), len(handle.calls)) == ([], EngineDead, 2)


@pytest.mark.parametrize("death", [*DIED, encode_error(EngineDead("ended"))])
def test_a_replica_lost_after_a_token_is_an_error_and_no_token_comes_twice(death: Any) -> None:
    """FR-65."""
    handle = Handle([FIRST, death], [FIRST, LAST])
    seen, error = play(handle)
    assert (seen, type(error), len(handle.calls)) == (["a"], EngineDead, 1)
    assert error is not None
    assert error.retry_after_s


def test_a_stream_that_just_stops_is_an_error() -> None:
    """FR-65: never a silent end."""
    seen, error = play(Handle([FIRST]))
    assert (seen, type(error)) == (["a"], EngineDead)


@pytest.mark.parametrize("death", DIED)
def test_a_replica_lost_after_the_last_token_has_answered(death: Exception) -> None:
    assert play(Handle([FIRST, LAST, death])) == (["a", "b"], None)


def test_every_choice_must_end() -> None:
    request = GenerateRequest("id", (1,), SamplingParams(n=2))
    both = encode_deltas([delta("b", "stop", 0), delta("c", "length", 1)])
    assert play(Handle([both]), request) == (["b", "c"], None)
    assert isinstance(play(Handle([FIRST, LAST]), request)[1], EngineDead)


def test_full_queues_become_429() -> None:
    seen, error = play(Handle([BackPressureError(9, 8)]))
    assert (seen, type(error)) == ([], Overloaded)
    assert error is not None
    assert error.retry_after_s


def test_a_missing_deployment_becomes_503() -> None:
    assert type(play(Handle([NO_DEPLOYMENT]))[1]) is Unavailable


def test_an_engines_error_comes_through_as_it_was() -> None:
    handle = Handle([encode_error(AdapterRefused("no DoRA", param="use_dora"))])
    _, error = play(handle)
    assert isinstance(error, AdapterRefused)
    assert error.param == "use_dora"
    assert len(handle.calls) == 1


def test_closing_the_iterator_cancels_the_call() -> None:
    """FR-56."""

    async def main() -> None:
        handle = Handle([FIRST, FIRST, LAST])
        stream = service(handle).generate(REQUEST)
        await anext(stream)
        await stream.aclose()
        assert handle.streams[0].is_cancelled

    asyncio.run(main())


def test_an_adapter_is_loaded_on_every_replica() -> None:
    handle = Handle(answers=[{"result": {"status": "ok"}}, ActorDiedError(), {"result": {"status": "ok"}}])
    assert asyncio.run(service(handle).load_adapter(SQL)) == {"status": "ok"}
    assert handle.broadcasts == [("load_adapter", {"name": "sql", "uri": "s3://b/sql", "version": "v1"})]


def test_one_replica_that_refuses_refuses_for_all() -> None:
    refusal = {"error": AdapterRefused("no DoRA", param="use_dora").to_dict()}
    handle = Handle(answers=[{"result": {"status": "ok"}}, refusal])
    with pytest.raises(AdapterRefused):
        asyncio.run(service(handle).load_adapter(SQL))


def test_unloading_what_a_replica_does_not_have_is_fine() -> None:
    handle = Handle(answers=[{"result": None}, {"error": {"class": "ModelNotFound"}}])
    asyncio.run(service(handle).unload_adapter("sql"))
    assert handle.broadcasts == [("unload_adapter", "sql")]


NOT_LOADED = {"error": ModelNotFound("not loaded").to_dict()}


def test_an_adapter_is_pinned_where_it_is_loaded() -> None:
    handle = Handle(answers=[NOT_LOADED, {"result": None}])
    asyncio.run(service(handle).pin_adapter("sql", True))
    assert handle.broadcasts == [("pin_adapter", "sql", True)]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([NOT_LOADED, NOT_LOADED], ModelNotFound),
        ([NOT_LOADED, {"result": None}, {"error": Conflict("no room").to_dict()}], Conflict),
    ],
)
def test_pinning_fails_where_no_replica_has_it_or_one_has_no_room(
    answers: list[Any], error: type[LorafleetError]
) -> None:
    with pytest.raises(error):
        asyncio.run(service(Handle(answers=answers)).pin_adapter("sql", True))


@pytest.mark.parametrize("answers", [NO_DEPLOYMENT, [ActorDiedError()]])
@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.check_health(),
        lambda s: s.load_adapter(SQL),
        lambda s: s.pin_adapter("sql", True),
    ],
)
def test_without_a_live_replica_every_call_is_unavailable(
    answers: Any, call: Callable[[FleetService], Awaitable[Any]]
) -> None:
    with pytest.raises(Unavailable):
        asyncio.run(_await(call(service(Handle(answers=answers)))))


@pytest.mark.parametrize(("answers", "is_none"), [(NO_DEPLOYMENT, True), ([ActorDiedError()], False)])
def test_the_catalog_can_tell_a_fleet_of_none_from_one_that_does_not_answer(
    answers: Any, is_none: bool
) -> None:
    with pytest.raises(Unavailable) as refused:
        asyncio.run(service(Handle(answers=answers)).load_adapter(SQL))
    assert (refused.value.code == NO_REPLICA) == is_none


def test_metrics_cover_the_replicas_that_answer() -> None:
    handle = Handle(answers=[{"replica": "r1", "running": 2}, ActorDiedError(), {"replica": "r2"}])
    text = asyncio.run(service(handle).metrics_text())
    assert 'lorafleet_requests_running{replica="r1"} 2' in text
    assert 'lorafleet_requests_running{replica="r2"} 0' in text
    assert replicas_in(text) == {"answers": 2, "silent": 1}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("answers", "silent"), [(NO_DEPLOYMENT, 0), ([ActorDiedError()], 1), ([HANGS, ActorDiedError()], 2)]
)
def test_metrics_without_a_live_replica_say_so(answers: Any, silent: int) -> None:
    """A fleet of none is when somebody looks. What a replica told once is not told again."""

    async def main() -> tuple[str, str, dict[str, Any]]:
        handle = Handle(answers=[{"replica": "r1", "running": 2, "adapters": {"sql": {"running": 2}}}])
        fleet = service(handle)
        before = await fleet.metrics_text()
        handle.answers = answers
        return before, await fleet.metrics_text(), await fleet.stats()

    before, text, stats = asyncio.run(main())
    assert replicas_in(before) == {"answers": 1, "silent": 0}
    assert replicas_in(text) == {"answers": 0, "silent": silent}
    assert 'replica="r1"' in before
    assert "replica=" not in text
    assert stats == {"replicas": []}


def replicas_in(text: str) -> dict[str, float]:
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == "lorafleet_replicas")
    return {sample.labels["state"]: sample.value for sample in family.samples}


@pytest.mark.usefixtures("impatient")
def test_a_replica_that_hangs_hides_no_other() -> None:
    async def main() -> None:
        fleet = service(Handle(answers=[HANGS, {"replica": "r2"}]))
        assert await fleet.broadcast("stats", timeout_s=0.1) == [{"replica": "r2"}]
        started = time.monotonic()
        await fleet.check_health()
        assert time.monotonic() - started < 0.1  # it does not wait for the other one
        with pytest.raises(Unavailable):
            await service(Handle(answers=[HANGS])).broadcast("stats", timeout_s=0.1)
        with pytest.raises(Unavailable):
            await service(Handle(answers=[HANGS, ActorDiedError()])).check_health()

    asyncio.run(main())


@pytest.mark.usefixtures("impatient")
def test_an_adapter_that_one_replica_is_not_heard_to_load_is_not_loaded() -> None:
    """FR-58: when a load returns, every replica has it."""
    fleet = FleetService(Handle(answers=[HANGS, {"result": {"status": "ok"}}]), "base", 256, 0.1)
    with pytest.raises(Unavailable):
        asyncio.run(fleet.load_adapter(SQL))


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
