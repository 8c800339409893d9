"""Where the server listens and what Ray is told. Starting it is tried in tests/cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
from ray.serve.schema import DeploymentStatus

from deployments.config import AppArgs
from deployments.launch import APP_NAME, Listen, Server, StartFailed, environment


def test_it_listens_on_this_machine_only_and_says_where() -> None:
    assert Listen().host == "127.0.0.1"
    assert Listen(port=9).url == "http://127.0.0.1:9"
    assert Listen(host="0.0.0.0", port=9).url == "http://127.0.0.1:9"
    assert Listen(host="::1", port=9).url == "http://[::1]:9"


def test_haproxy_is_not_chosen_for_a_server_of_this_machine() -> None:
    """It binds ports of its own on all interfaces."""
    assert not Listen().uses_haproxy
    assert Listen(host="0.0.0.0").uses_haproxy
    assert Listen(proxy="haproxy").uses_haproxy
    assert not Listen(host="0.0.0.0", proxy="python").uses_haproxy


def test_a_taken_port_is_known_before_ray_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(StartFailed, match="cannot listen on"):
            Listen(port=other.getsockname()[1]).check_free()


def test_sigterm_ends_a_server_that_starts_in_good_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's handler would abort, and leave processes behind; large weights take minutes."""

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stands for Ray's

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.serve.start", lambda **options: None)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Server(AppArgs(model="m"), Listen())._start_ray()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_server_that_cannot_start_tells_the_cause_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Deploying app failed")

    def deployment(status: str, message: str) -> SimpleNamespace:
        return SimpleNamespace(status=DeploymentStatus(status), message=message)

    deployments = {
        "engine": deployment("DEPLOY_FAILED", "Traceback:\n  x\nInvalidRequest: the pool is too small\n"),
        "ingress": deployment("UPDATING", "It took long.\nThis may be caused by a slow __init__."),
        "catalog": deployment("HEALTHY", ""),
    }
    status = SimpleNamespace(applications={APP_NAME: SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr("deployments.app.build", lambda args: None)
    monkeypatch.setattr("ray.serve.run", fail)
    monkeypatch.setattr("ray.serve.status", lambda: status)
    server = Server(AppArgs(model="m"), Listen())
    with pytest.raises(StartFailed) as refused:
        server._deploy()
    assert str(refused.value) == "InvalidRequest: the pool is too small"
    deployments.pop("engine")
    with pytest.raises(StartFailed, match="Deploying app failed"):
        server._deploy()


def test_rays_ports_ask_for_a_fresh_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    one, two = environment(Listen(), {}), environment(Listen(), {})
    assert one["RAY_AUTH_MODE"] == "token"
    assert one["RAY_AUTH_TOKEN"] != two["RAY_AUTH_TOKEN"]
    assert one["RAY_USAGE_STATS_ENABLED"] == "0"


def test_what_the_user_set_stays() -> None:
    given = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "0", "RAY_ADDRESS": "auto"}
    wanted = environment(Listen(), given)
    assert not wanted.keys() & {"RAY_SERVE_THROUGHPUT_OPTIMIZED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert os.environ.get("RAY_AUTH_TOKEN") is None
