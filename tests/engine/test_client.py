"""An engine process over a real socket, with a tiny real model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.adapters.source import describe
from engine.choices import Choice
from engine.client import EngineClient
from engine.errors import AdapterRefused, EngineDead, InvalidRequest, ModelNotFound, Unavailable
from engine.events import TokenEvent
from engine.request import AdapterRef, GenerateRequest, OutputDelta
from tests.tiny import make_adapter, make_llama

pytestmark = [pytest.mark.cluster, pytest.mark.anyio]

PROMPT = tuple(b"The quick brown fox")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("client") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> AdapterRef:
    path = make_adapter(base, base.parent / "a", rank=8, targets=["q_proj", "up_proj"], seed=1)
    return AdapterRef("a", str(path), describe(str(path)).version)


def config(base: Path, **overrides: Any) -> EngineConfig:
    return EngineConfig(
        model=str(base), debug=True, **{"num_pages": 100, "num_threads": 1, "max_num_seqs": 64} | overrides
    )


@asynccontextmanager
async def running(base: Path, **overrides: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(base, **overrides))
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@pytest.fixture(scope="module")
async def client(base: Path) -> AsyncIterator[EngineClient]:
    """For all who leave it as they found it."""
    async with running(base, num_pages=200) as client:
        yield client


def request(
    request_id: str, adapter: AdapterRef | None = None, prompt: tuple[int, ...] = PROMPT, **params: Any
) -> GenerateRequest:
    settings = {"temperature": 0.0, "max_tokens": 12} | params
    return GenerateRequest(request_id, prompt, SamplingParams(**settings), adapter)


async def collect(client: EngineClient, request: GenerateRequest) -> list[OutputDelta]:
    return [delta async for deltas in client.generate(request) for delta in deltas]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110  the engine tells its statistics, not its events
            await asyncio.sleep(0.02)


async def is_quiet(client: EngineClient) -> bool:
    stats = await client.stats()
    return bool(stats["running"] == stats["waiting"] == stats["pages"]["kv"] == 0)


async def test_tokens_equal_the_engine_in_process(
    client: EngineClient, base: Path, adapter: AdapterRef
) -> None:
    engine = Engine(config(base))
    engine.load_adapter("a", adapter.uri)
    expected = engine.generate([PROMPT, PROMPT], SamplingParams(temperature=0, max_tokens=12), [None, "a"])
    engine.close()
    outputs = await asyncio.gather(collect(client, request("1")), collect(client, request("2", adapter)))
    for deltas, output in zip(outputs, expected, strict=True):
        assert tuple(t for delta in deltas for t in delta.token_ids) == output.token_ids
        assert "".join(delta.text for delta in deltas) == output.text
        assert [delta.finish_reason for delta in deltas[-2:]] == [None, "length"]


async def test_requests_of_one_id_do_not_disturb_each_other(client: EngineClient) -> None:
    both = await asyncio.gather(*(collect(client, request("1")) for _ in range(2)))
    for deltas in both:
        assert sum(len(delta.token_ids) for delta in deltas) == 12


async def test_what_comes_late_of_a_closed_stream_is_not_taken_for_the_next_one_of_its_id(
    client: EngineClient,
) -> None:
    for _ in range(10):
        stream = client.generate(request("1", max_tokens=200))
        await anext(stream)
        await stream.aclose()
        deltas = await collect(client, request("1", prompt=tuple(b"another")))
        assert sum(len(delta.token_ids) for delta in deltas) == 12
        assert deltas[-1].finish_reason == "length"


async def test_a_fault_of_ours_in_one_stream_harms_no_other(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Choice.feed

    def broken(choice: Choice, event: TokenEvent) -> OutputDelta | None:
        if event.request_id.startswith("bad"):
            raise RuntimeError("ours")
        return feed(choice, event)

    monkeypatch.setattr(Choice, "feed", broken)
    bad, good = await asyncio.gather(
        collect(client, request("bad", n=2, max_tokens=200)),
        collect(client, request("good")),
        return_exceptions=True,
    )
    assert isinstance(bad, RuntimeError)
    assert isinstance(good, list)
    assert sum(len(delta.token_ids) for delta in good) == 12
    await until(partial(is_quiet, client))


async def test_choices_differ_and_repeat_by_seed(client: EngineClient) -> None:
    """FR-55."""
    texts = []
    for request_id in ("1", "2"):
        deltas = await collect(client, request(request_id, n=3, seed=7, temperature=1.0))
        texts.append([[d.token_ids for d in deltas if d.index == index] for index in range(3)])
    assert texts[0] == texts[1]
    assert len({str(text) for text in texts[0]}) == 3


async def test_closing_a_stream_aborts_it(client: EngineClient, adapter: AdapterRef) -> None:
    """FR-56: closed at random points, nothing stays behind."""

    async def cancelled(number: int) -> None:
        stream = client.generate(request(str(number), adapter if number % 2 else None, max_tokens=200))
        for _ in range(number % 20):
            await anext(stream)
        await stream.aclose()

    await asyncio.gather(*(cancelled(number) for number in range(60)))
    await until(partial(is_quiet, client))
    assert await collect(client, request("after"))


async def test_leaving_in_the_pause_between_two_pieces_aborts_too(client: EngineClient) -> None:
    """FR-56: whoever waits is cancelled, or closes the stream."""
    cancelled, closed = (client.generate(request(name, max_tokens=300), interval_s=60) for name in "12")
    await anext(cancelled)
    waiting = asyncio.ensure_future(anext(cancelled))
    await anext(closed)
    await closed.aclose()
    await asyncio.sleep(0.02)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(partial(is_quiet, client))


async def test_with_an_interval_the_first_token_and_the_end_go_at_once(client: EngineClient) -> None:
    pieces = [deltas async for deltas in client.generate(request("paced"), interval_s=60)]
    assert len(pieces) == 2
    assert sum(len(delta.token_ids) for deltas in pieces for delta in deltas) == 12


async def test_stop_string_ends_the_engine_request_too(client: EngineClient) -> None:
    """FR-49."""
    whole = "".join(d.text for d in await collect(client, request("1", max_tokens=100)))
    stop = whole[10:13]
    deltas = await collect(client, request("2", max_tokens=100, stop=(stop,)))
    text = "".join(d.text for d in deltas)
    assert text == whole[: whole.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)

    async def is_quiet() -> bool:
        return bool((await client.stats())["running"] == 0)

    await until(is_quiet)


async def test_errors_cross_the_process_boundary(client: EngineClient, tmp_path: Path) -> None:
    """FR-26, FR-53: bad input is an error of its own request; the next one runs."""
    with pytest.raises(InvalidRequest) as caught:
        await collect(client, request("1", prompt=(999,)))
    assert caught.value.param == "prompt"
    with pytest.raises(ModelNotFound):
        await collect(client, request("2", AdapterRef("none", str(tmp_path / "none"), "1")))
    with pytest.raises(ModelNotFound):
        await client.unload_adapter("none")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(AdapterRefused):
        await client.load_adapter(AdapterRef("bad", str(tmp_path), "1"))
    assert await collect(client, request("3"))


async def test_load_report_and_unload(client: EngineClient, adapter: AdapterRef) -> None:
    report = await client.load_adapter(adapter)
    assert report["status"] == "ok"
    assert report["bound"] == report["present"] == 8
    await collect(client, request("1", adapter))
    await client.unload_adapter("a")

    async def is_gone() -> bool:
        stats = await client.stats()
        return "a" not in stats["adapters"] and stats["pages"]["adapters"] == 0

    await until(is_gone)


async def test_a_hint_loads_and_copies_ahead_and_a_bad_one_harms_nobody(
    base: Path, adapter: AdapterRef, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(base) as client:
        await client.prefetch(AdapterRef("none", str(tmp_path / "none"), "1"))
        await client.prefetch(adapter)

        async def hints_are(copied: int, used: int) -> bool:
            prefetches = (await client.stats()).get("prefetches", {})
            return bool(prefetches.get("hint") == {"copied": copied, "used": used})

        await until(lambda: hints_are(copied=1, used=0))
        assert await collect(client, request("1", adapter))
        await until(lambda: hints_are(copied=1, used=1))
        adapters = (await client.stats())["adapters"]
        assert (adapters["a"]["hits"]["hbm"], adapters["a"]["misses"]) == (1, 0)
        assert "none" not in adapters
    assert "none" not in capfd.readouterr().err


async def test_death_of_the_process_is_an_error_not_a_silent_end(base: Path) -> None:
    """FR-65."""
    client = EngineClient(config(base))
    await client.start()
    stream = client.generate(request("1", max_tokens=300))
    await anext(stream)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        async for _ in stream:
            pass
    with pytest.raises(EngineDead):
        await client.stats()
    with pytest.raises(EngineDead):
        await client.prefetch(AdapterRef("a", "x"))
    assert not client.is_alive
    await client.stop()


async def test_one_that_has_ended_is_not_said_to_hang(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = EngineClient(config(base, heartbeat_timeout_s=1.5))
    await client.start()
    os.kill(client.pid, signal.SIGKILL)
    await client.wait_for_death()
    await asyncio.sleep(3.5)
    assert "no sign of life" not in caplog.text
    await client.stop()


async def test_a_process_that_hangs_is_ended(base: Path) -> None:
    """FR-65: its streams get an error within seconds, and nobody waits for it at the stop."""
    client = EngineClient(config(base, heartbeat_timeout_s=2.0))
    await client.start()
    await asyncio.sleep(3.5)  # idle, but it gives signs of life
    assert client.is_alive
    stream = client.generate(request("1", max_tokens=300))
    await anext(stream)
    os.kill(client.pid, signal.SIGSTOP)
    async with asyncio.timeout(6):
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
    await client.stop()


async def test_a_step_that_hangs_ends_the_process(base: Path) -> None:
    """Its other threads go on giving signs of life, so the loop's age decides."""
    # more than an idle loop sleeps, which is part of its age
    async with running(base, step_timeout_s=5.0) as client:
        await collect(client, request("1", max_tokens=100))
        client._dispatch({"beat": 4.0})
        await asyncio.sleep(0.1)
        assert client.is_alive
        client._dispatch({"beat": 6.0})
        async with asyncio.timeout(5):
            await client.wait_for_death()
        assert not client.is_alive


async def test_the_process_ends_with_its_client(base: Path) -> None:
    client = EngineClient(config(base))
    await client.start()
    pid = client.pid
    await client.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_streams_outlive_the_process_that_reads_adapters(base: Path, adapter: AdapterRef) -> None:
    async with running(base) as client:
        stream = client.generate(request("1", max_tokens=300))
        deltas = await anext(stream)
        (reader,) = load_processes(client.pid)
        os.kill(reader, signal.SIGKILL)

        async def is_loaded() -> bool:
            """Not in the moment before the death is noticed."""
            with contextlib.suppress(Unavailable):
                await client.load_adapter(adapter)
                return True
            return False

        await until(is_loaded)
        (successor,) = load_processes(client.pid)
        assert successor != reader
        deltas += [delta async for some in stream for delta in some]
        assert deltas[-1].finish_reason == "length"
    with pytest.raises(ProcessLookupError):
        os.kill(successor, 0)


def load_processes(parent: int) -> list[int]:
    """Children of it that read adapters."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, _, stat = (path / "stat").read_text().rpartition(")")
            is_child = int(stat.split()[1]) == parent
            if is_child and b"engine.adapters.load_process" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


async def test_a_process_that_ends_at_once_is_told_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read its configuration, so its stream does not just end."""
    monkeypatch.setattr(sys, "executable", "false")
    client = EngineClient(config(tmp_path))
    with pytest.raises(EngineDead):
        await client.start()


async def test_model_that_cannot_be_served_is_told_at_start(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path))
    with pytest.raises(InvalidRequest):
        await client.start()
