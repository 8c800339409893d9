"""A replica's own page, over a real socket."""

from __future__ import annotations

import asyncio
import logging
import urllib.request

import pytest

from deployments.metrics_server import MetricsServer


async def stats() -> dict[str, object]:
    return {"replica": "r1", "running": 3}


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_the_page_shows_what_the_replica_says_now() -> None:
    async def main() -> None:
        server = MetricsServer(0, stats)
        assert server.port is not None
        text = await asyncio.to_thread(read, server.port)
        assert 'lorafleet_requests_running{replica="r1"} 3.0' in text
        assert 'vllm:num_requests_running{replica="r1"} 3.0' in text
        await server.stop()
        with pytest.raises(OSError):  # refused
            await asyncio.to_thread(read, server.port)

    asyncio.run(main())


def test_a_port_that_is_taken_costs_the_page_and_not_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        first = MetricsServer(0, stats)
        assert first.port is not None
        with caplog.at_level(logging.WARNING):
            second = MetricsServer(first.port, stats)
        assert "no metrics page" in caplog.text
        assert second.port is None
        await second.stop()
        await first.stop()

    asyncio.run(main())
