"""The client and the command over a server that answers, fails and breaks off on demand."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from load_tests.harness import __main__ as command
from load_tests.harness.client import CUT_OFF, NO_ANSWER, Record, Target, run
from load_tests.harness.faulty_link import FaultyLink
from load_tests.harness.workload import Planned

TOKENS, WAIT_S = 4, 0.1
DELAY_S = 0.3


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class FakeServer:
    """Its adapters say what happens."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def models(self, request: web.Request) -> web.Response:
        cards = [
            {"id": "base", "parent": None},
            *({"id": name, "parent": "base"} for name in ("good", "busy")),
        ]
        return web.json_response({"data": cards})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "busy":
            return web.json_response({"error": {"code": "overloaded"}}, status=429)
        if body["model"] == "odd":
            return web.Response(status=502, text="<html>")
        answer = web.StreamResponse()
        await answer.prepare(request)
        for number in range(TOKENS):
            await asyncio.sleep(WAIT_S)
            if body["model"] == "cut" and number == 2:
                return answer
            if body["model"] == "broken" and number == 2:
                await answer.write(event({"error": {"code": "engine_dead"}}))
                return answer
            # what others than the tokens a stream may hold
            await answer.write(b": alive\n\nevent: token\n" + event({"choices": [{"text": "x"}]}))
        await answer.write(
            event({"choices": [], "usage": {"completion_tokens": TOKENS}}) + b"data: [DONE]\n\n"
        )
        return answer


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@contextmanager
def serving_in_a_thread() -> Iterator[tuple[FakeServer, int]]:
    server, ready, ports = FakeServer(), threading.Event(), []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        async with serving(server) as port:
            ports.append(port)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(5)
    yield server, ports[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def ask(*names: str, at: tuple[float, ...] = ()) -> list[Record]:
    async def main() -> list[Record]:
        async with serving(FakeServer()) as port:
            target = Target(f"http://127.0.0.1:{port}", names)
            planned = [
                Planned(time_s, i, (1, 2), TOKENS) for i, time_s in enumerate(at or (0.0,) * len(names))
            ]
            return await run(target, planned)

    return asyncio.run(main())


def test_an_answer_has_its_times_and_tokens() -> None:
    (record,) = ask("good")
    assert (record.error, record.num_output, record.adapter) == (None, TOKENS, "good")
    assert record.ttft_s is not None
    assert record.tpot_s is not None
    assert record.ttft_s >= WAIT_S
    assert record.tpot_s >= WAIT_S * 0.9


def test_what_goes_wrong_has_a_name() -> None:
    errors = {record.adapter: record.error for record in ask("busy", "odd", "cut", "broken")}
    assert errors == {"busy": "overloaded", "odd": "502", "cut": CUT_OFF, "broken": "engine_dead"}


def test_a_server_that_is_not_there_is_no_answer() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    (record,) = asyncio.run(run(Target(url, ("a",)), [Planned(0.0, 0, (1,), 1)]))
    assert record.error == NO_ANSWER


def test_requests_leave_when_they_are_due_answered_or_not() -> None:
    slow, late = ask("good", "good", at=(0.0, WAIT_S))
    assert slow.last is not None
    assert WAIT_S <= late.sent < slow.last


def test_the_command_reports_and_judges(tmp_path: Path) -> None:
    flags = ["--preset", "punica-identical", "--rate", "40", "--duration", "1", "--length-scale", "0.01"]
    with serving_in_a_thread() as (server, port):
        url = ["--url", f"http://127.0.0.1:{port}", "--out", str(tmp_path)]
        assert command.main([*flags, *url]) == 0
        assert command.main([*flags, *url, "--max-ttft-p95", "0.0001"]) == 1
        assert command.main([*flags, *url, "--adapters", "busy", "--max-error-share", "0.5"]) == 1
    assert {body["model"] for body in server.bodies} == {"good", "busy"}
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["groups"]["all"]["errors"].keys() == {"overloaded"}
    page = (tmp_path / "report.html").read_text()
    assert "Missed: errors: 1, not at most 0.5" in page
    for picture in ("ttft.png", "rates.png", "latencies.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
        assert picture in page


def test_a_command_without_a_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--url", "http://127.0.0.1:9"])
    assert "does not answer" in capsys.readouterr().err


def test_a_link_can_be_slow_and_cut_and_well_again() -> None:
    with serving_in_a_thread() as (_, port), FaultyLink(port) as link:
        target = Target(f"http://127.0.0.1:{link.port}", ("good",))

        def one() -> Record:
            (record,) = asyncio.run(run(target, [Planned(0.0, 0, (random.randrange(9),), 1)]))
            return record

        quick = one()
        link.delay_s = DELAY_S
        slow = one()
        link.delay_s, link.is_cut = 0.0, True
        cut = one()
        link.is_cut = False
        well = one()
    assert (quick.error, slow.error, cut.error, well.error) == (None, None, NO_ANSWER, None)
    assert slow.ttft_s is not None
    assert slow.ttft_s > 2 * DELAY_S + WAIT_S, "once there and once back"
