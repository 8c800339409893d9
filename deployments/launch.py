"""Starts Ray, Serve and the application on this machine, or the application on a cluster; stops them again.

Two proxies. `python` is Serve's own; it binds the given host only. `haproxy` is faster but binds ports of
its own on all interfaces (the replicas' 30000 and up, statistics on 8404), so it is never chosen for a server
that is meant for this machine alone: `auto` takes it when the server is open to the network anyway.
MEASUREMENTS
Both run Serve's throughput-optimised mode: gRPC between replicas, and no second event loop in each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from deployments.config import AppArgs

APP_NAME = "lorafleet"
OBJECT_STORE_BYTES = 128 << 20  # requests and chunks are small; weights never go through it
SPARE_CPUS = 4  # logical: Serve's controller, catalog, ingress replicas

Proxy = Literal["auto", "python", "haproxy"]


class PortTaken(Exception):
    """Another server has the port."""


@dataclass(frozen=True, slots=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8000
    proxy: Proxy = "auto"

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_open(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    @property
    def uses_haproxy(self) -> bool:
        return self.proxy == "haproxy" or (self.proxy == "auto" and self.is_open)

    def check_free(self) -> None:
        """Ray would take half a minute to tell. Raises PortTaken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise PortTaken(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from error


class Server:
    """A context manager: the application answers inside, and nothing of it is left after."""

    def __init__(self, args: AppArgs, listen: Listen) -> None:
        self._args = args
        self._listen = listen

    def __enter__(self) -> Self:
        """Returns when the first request can be answered. Raises PortTaken or RuntimeError."""
        self._listen.check_free()
        os.environ.update(environment(self._listen, os.environ))  # read when ray is imported, and inherited
        import ray
        from ray import serve

        from deployments.app import build

        # their progress is noise here; everything is in the session's log files
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        cluster: dict[str, Any] = {}
        if "RAY_ADDRESS" not in os.environ:
            cluster = {
                "address": "local",
                "num_cpus": self._args.num_replicas + SPARE_CPUS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, **cluster)
            serve.start(http_options={"host": self._listen.host, "port": self._listen.port})
            serve.run(build(_share_cpus(self._args)), name=APP_NAME)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        import ray
        from ray import serve

        if ray.is_initialized():
            # Ray reports the end of its own actors as failures
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                serve.delete(APP_NAME)  # answers under way end within their grace period
                ray.shutdown()


def environment(listen: Listen, given: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(listen.uses_haproxy)),
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(listen.uses_haproxy)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # its 30 s are for balancers in front
        # Ray's own ports are open to the network; who cannot show this token is turned away
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # a lost engine's GPU is not held for the time of a graceful stop
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    }
    # Ray reads these two when it is imported
    if "RAY_ADDRESS" in given or "RAY_AUTH_MODE" in given or "ray" in sys.modules:
        del wanted["RAY_AUTH_MODE"], wanted["RAY_AUTH_TOKEN"]
    return {name: value for name, value in wanted.items() if name not in given}


def _share_cpus(args: AppArgs) -> AppArgs:
    """Ray gives an actor one thread, and torch would take all of the machine for each replica."""
    if args.device != "cpu" or "num_threads" in args.engine or "RAY_ADDRESS" in os.environ:
        return args
    num_threads = max(1, len(os.sched_getaffinity(0)) // args.num_replicas)
    return args.model_copy(update={"engine": {**args.engine, "num_threads": num_threads}})
