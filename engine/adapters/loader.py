"""Loads adapters in threads of its own: several at once, each version once, none beyond its deadline.

Knows adapters' references, not who waits for them: a waiter that goes away changes nothing here. A thread
that is stuck in a read when its load's deadline passes is given up, and its place goes to the next load.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.adapters.image import AdapterImage
from engine.adapters.loading import load_image
from engine.config import EngineConfig
from engine.errors import LorafleetError, Unavailable
from engine.request import AdapterRef
from engine.shape import ModelShape

logger = logging.getLogger(__name__)

FAILURE_TTL_S = 5.0  # for so long the same version is not tried again
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    ref: AdapterRef
    image: AdapterImage | None
    error: LorafleetError | None  # if there is no image
    seconds: float  # that the load took; 0 for a failure that is remembered


class _Key(NamedTuple):
    uri: str
    version: str


class _Failure(NamedTuple):
    error: LorafleetError
    until: float


@dataclass(slots=True, eq=False)
class _Load:
    key: _Key
    refs: list[AdapterRef]  # those that asked for it; they differ in their names
    started: float = 0.0
    threads: list[threading.Thread] = field(default_factory=list)  # the one that reads and the deadline's


class AdapterLoader:
    """Every submitted reference gets one LoadResult, unless the loader is closed before."""

    def __init__(
        self,
        shape: ModelShape,
        page_elems: int,
        dtype: torch.dtype,
        config: EngineConfig,
        on_done: Callable[[LoadResult], None],  # called from the loader's threads
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = shape
        self._page_elems = page_elems
        self._dtype = dtype
        self._config = config
        self._on_done = on_done
        self._clock = clock
        self._lock = threading.Lock()  # over everything below
        self._queue: deque[_Load] = deque()
        self._loads: dict[_Key, _Load] = {}  # queued and running
        self._num_running = 0
        self._failures: dict[_Key, _Failure] = {}
        self._closed = False

    def submit(self, ref: AdapterRef) -> None:
        """Start reading, or join the load of that version. Neither waits nor raises."""
        key = _Key(ref.uri, ref.version)
        with self._lock:
            if self._closed:
                return
            if key in self._loads:
                if ref not in self._loads[key].refs:
                    self._loads[key].refs.append(ref)
                return
            failure = self._failures.get(key)
            if failure is not None and self._clock() < failure.until:
                result = LoadResult(ref, None, failure.error, 0.0)
                _start_thread(self._hand_over, [result])
                return
            load = _Load(key, [ref])
            self._loads[key] = load
            self._queue.append(load)
            self._start_loads()

    def close(self) -> None:
        """No result is handed over any more. Reads end soon, or are given up."""
        with self._lock:
            self._closed = True
            threads = [thread for load in self._loads.values() for thread in load.threads]
            self._loads.clear()
            self._queue.clear()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in threads:
            if isinstance(thread, threading.Timer):
                thread.cancel()
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_loads(self) -> None:
        while self._queue and self._num_running < self._config.max_parallel_loads:
            load = self._queue.popleft()
            load.started = self._clock()
            self._num_running += 1
            timer = threading.Timer(self._config.load_timeout_s, self._expire, [load])
            timer.daemon = True
            timer.start()
            load.threads = [timer, _start_thread(self._run, load, timer)]

    def _run(self, load: _Load, timer: threading.Timer) -> None:
        image, error = self._read(load)
        timer.cancel()
        self._end(load, image, error)

    def _read(self, load: _Load) -> tuple[AdapterImage | None, LorafleetError | None]:
        def check() -> None:
            with self._lock:
                if self._loads.get(load.key) is not load:
                    raise Unavailable("the load was given up")

        try:
            image = load_image(
                load.key.uri,
                self._shape,
                self._page_elems,
                self._dtype,
                self._config.max_rank,
                pin_memory=self._config.device == "cuda",
                check=check,
            )
        except LorafleetError as error:
            return None, error
        except Exception:
            # a fault of ours, but those who wait must hear of it
            logger.exception("loading adapter %r failed", load.refs[0].name)
            return None, LorafleetError("internal error while the adapter was loaded")
        return image, None

    def _expire(self, load: _Load) -> None:
        limit = self._config.load_timeout_s
        message = f"loading the adapter took more than {limit:g} s"
        self._end(load, None, Unavailable(message, retry_after_s=FAILURE_TTL_S))

    def _end(self, load: _Load, image: AdapterImage | None, error: LorafleetError | None) -> None:
        with self._lock:
            if self._loads.get(load.key) is not load:
                return  # given up before
            del self._loads[load.key]
            self._num_running -= 1
            now = self._clock()
            self._failures = {key: f for key, f in self._failures.items() if now < f.until}
            if error is not None:
                self._failures[load.key] = _Failure(error, now + FAILURE_TTL_S)
            self._start_loads()
        self._hand_over([LoadResult(ref, _named(image, ref), error, now - load.started) for ref in load.refs])

    def _hand_over(self, results: list[LoadResult]) -> None:
        for result in results:
            try:
                self._on_done(result)
            except Exception:
                logger.exception("the result of loading adapter %r was not taken", result.ref.name)


def _start_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    # a daemon: a read that is stuck must not keep the process alive
    thread = threading.Thread(target=target, args=args, name="adapter-load", daemon=True)
    thread.start()
    return thread


def _named(image: AdapterImage | None, ref: AdapterRef) -> AdapterImage | None:
    """The same image, its report with the name that it was asked for by."""
    if image is None:
        return None
    return dataclasses.replace(image, report={**image.report, "adapter": ref.name})
