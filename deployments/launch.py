"""Starts Ray, Serve and the application on this machine, or the application on a cluster; stops them again.

Two proxies, both in Serve's throughput-optimised mode (gRPC between replicas, one event loop in each).
`python` is Serve's own and opens the given host and port only. `haproxy` is faster, but has fixed ports
beside it: 30000 and up for the front ends, and 8404 and 9101, which show its statistics on all interfaces.
So `auto` takes it for a server that is open to the network, never for one meant for this machine alone.

Measured on two cores with a fake engine, four runs each. 8 streams of 50 tokens/s: both carry 366 to 390 of
400 tokens/s; the first token takes 57 to 62 ms with `python` and 30 to 46 with `haproxy`. One-token requests,
8 at a time: 77 to 123 a second and 178 to 234. Without throughput mode `python` takes 65 to 86 ms and carries
83 to 108. Starting takes 12 to 22 s, stopping 5 to 7.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from deployments.config import AppArgs
from engine.errors import LorafleetError

APP_NAME = "lorafleet"
OBJECT_STORE_BYTES = 128 << 20  # requests and chunks are small; weights never go through it
AT_ONCE_S = 0.2  # most mistakes show before anything heavy is imported
SPARE_CPUS = 4  # logical: Serve's controller, catalog, ingress replicas

Proxy = Literal["auto", "python", "haproxy"]


class StartFailed(Exception):
    """The message says why."""


@dataclass(frozen=True, slots=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8000
    proxy: Proxy = "auto"

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.is_open else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def is_open(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    @property
    def uses_haproxy(self) -> bool:
        return self.proxy == "haproxy" or (self.proxy == "auto" and self.is_open)

    def check_free(self) -> None:
        """Ray would take half a minute to tell. Raises StartFailed."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise StartFailed(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from error


class Server:
    """A context manager: the application answers inside, and nothing of it is left after."""

    def __init__(self, args: AppArgs, listen: Listen) -> None:
        self._args = args
        self._listen = listen
        self._has_ray = False

    def __enter__(self) -> Self:
        """Returns when the first request can be answered. Raises StartFailed."""
        self._listen.check_free()
        os.environ.update(environment(self._listen, os.environ))  # read when ray is imported, and inherited
        try:
            with ThreadPoolExecutor(1) as threads:
                # Serve would start everything first and then say very little
                checked = threads.submit(check_arguments, self._args)
                if wait((checked,), timeout=AT_ONCE_S).done:
                    checked.result()
                self._start_ray()
                checked.result()
            self._deploy()
        except LorafleetError as error:
            self.__exit__(None, None, None)
            raise StartFailed(error.message) from error
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_ray(self) -> None:
        self._has_ray = True
        import ray
        from ray import serve

        # their progress is noise here; everything is in the session's log files
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        cluster: dict[str, Any] = {}
        if "RAY_ADDRESS" not in os.environ:
            cluster = {
                "address": "local",
                "num_cpus": self._args.most_replicas * self._args.cpus_per_replica + SPARE_CPUS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **cluster)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put a handler there that aborts
        serve.start(http_options={"host": self._listen.host, "port": self._listen.port})

    def _deploy(self) -> None:
        from ray import serve

        from deployments.app import build

        try:
            serve.run(build(_share_cpus(self._args)), name=APP_NAME)
        except RuntimeError as error:
            application = serve.status().applications[APP_NAME]
            # others may say that they start slowly: they wait for it
            failed = [one for one in application.deployments.values() if one.status == "DEPLOY_FAILED"]
            # each is a traceback through Serve, the cause in its last line
            causes = [one.message.strip().splitlines()[-1] for one in failed if one.message.strip()]
            raise StartFailed("; ".join(causes) or str(error)) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._has_ray:
            return
        import ray
        from ray import serve

        if ray.is_initialized():
            # Ray reports the end of its own actors as failures
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                # answers under way end within their grace period, or at a second Ctrl-C
                with contextlib.suppress(KeyboardInterrupt):
                    serve.delete(APP_NAME)
                ray.shutdown()


def check_arguments(args: AppArgs) -> None:
    """What can be seen from here. Raises LorafleetError."""
    from engine.adapters.source import open_source
    from engine.model.spec import load_model_spec

    if "RAY_ADDRESS" not in os.environ:  # else the other machines' files count
        if args.adapter_source is not None:
            open_source(args.adapter_source)
        load_model_spec(args.model)


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
        # a proxy that died is replaced after three looks; Serve's own 10 s made that half a minute
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # how late Serve hears what its replicas were told of the fleet's size; its own are 10 s
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
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
    num_threads = max(1, len(os.sched_getaffinity(0)) // args.most_replicas)
    return args.model_copy(update={"engine": {**args.engine, "num_threads": num_threads}})
