"""Loads adapters in threads of its own: several at once, each version once, none beyond its deadline.

Knows adapters' references, not who waits for them: a waiter that goes away changes nothing here. A thread
that is stuck in a read when its load's deadline passes is given up, and its place goes to the next load. A
load that makes no progress for a second lends its place to another: one slow source holds back no other.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.image_reader import ImageReader, LocalReader, WantedImage
from engine.adapters.manager import STALL_FACTOR, Version
from engine.config import EngineConfig
from engine.errors import AdapterRefused, LorafleetError, Unavailable
from engine.request import AdapterRef

logger = logging.getLogger(__name__)

FAILURE_TTL_S = 5.0  # for so long the same version is not tried again
REFUSAL_TTL_S = 60.0  # the same bytes will be refused again
STALLED_S = 1.0  # without a byte
_TICK_S = 0.05
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    ref: AdapterRef
    image: AdapterImage | None
    error: LorafleetError | None  # if there is no image
    seconds: float  # that the load took; 0 for a failure that is remembered


class _Failure(NamedTuple):
    error: LorafleetError
    until: float


@dataclass(slots=True, eq=False)
class _Load:
    key: Version
    refs: list[AdapterRef]  # those that asked for it; they differ in their names
    started: float = 0.0
    progressed: float = 0.0
    is_over: bool = False


class AdapterLoader:
    """Every submitted reference gets one LoadResult, unless the loader is closed before."""

    def __init__(
        self,
        form: ImageFormat,
        config: EngineConfig,
        on_done: Callable[[LoadResult], None],  # called from the loader's threads, or within `submit`
        clock: Callable[[], float] = time.monotonic,
        reader: ImageReader | None = None,
    ) -> None:
        """`reader`: closed with this; None: threads of this process. Raises as that does."""
        self._form = form
        self._reader: ImageReader = reader or LocalReader(config)
        self._config = config
        self._on_done = on_done
        self._clock = clock
        self._lock = threading.Lock()  # over everything below
        self._queue: deque[_Load] = deque()
        self._loads: dict[Version, _Load] = {}  # queued and running
        self._running: list[_Load] = []
        self._failures: dict[Version, _Failure] = {}
        self._is_watched = False  # while loads run
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()

    def submit(self, ref: AdapterRef) -> None:
        """Start reading, or join the load of that version. Neither waits nor raises."""
        with self._lock:
            failure = None if self._closed.is_set() else self._start_or_join(ref)
        if failure is not None:
            self._hand_over([LoadResult(ref, None, failure, 0.0)])

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        """What was read well turned out to be of no use: for a while, do not read that version again."""
        with self._lock:
            self._remember(Version(ref.uri, ref.version), error)

    def forget_failure(self, ref: AdapterRef) -> None:
        """The next load of that version is tried again, whatever was remembered of the last one."""
        with self._lock:
            self._failures.pop(Version(ref.uri, ref.version), None)

    def close(self) -> None:
        """No result is handed over any more. Reads end soon, or are given up."""
        with self._lock:
            self._closed.set()
            threads = self._threads - {threading.current_thread()}
            for load in self._running:
                load.is_over = True
            self._loads.clear()
            self._queue.clear()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._reader.close()

    def _start_or_join(self, ref: AdapterRef) -> LorafleetError | None:
        """The failure if that is remembered: then nothing is read."""
        key = Version(ref.uri, ref.version)
        if key in self._loads:
            if ref not in self._loads[key].refs:
                self._loads[key].refs.append(ref)
            return None
        failure = self._failures.get(key)
        if failure is not None and self._clock() < failure.until:
            return failure.error
        self._loads[key] = _Load(key, [ref])
        self._queue.append(self._loads[key])
        self._start_loads()
        return None

    def _start_loads(self) -> None:
        now = self._clock()
        most = self._config.max_parallel_loads
        num_moving = sum(now - load.progressed < STALLED_S for load in self._running)
        while self._queue and num_moving < most and len(self._running) < STALL_FACTOR * most:
            load = self._queue.popleft()
            load.started = load.progressed = now
            self._running.append(load)
            self._start_thread(self._run, load)
            num_moving += 1
        if self._running and not self._is_watched:
            self._is_watched = True
            self._start_thread(self._watch)

    def _watch(self) -> None:
        """End loads at their deadline; start others while some stall."""
        while not self._closed.wait(_TICK_S):
            with self._lock:
                if not self._running:
                    self._is_watched = False
                    return
                limit = self._config.load_timeout_s
                late = [load for load in self._running if self._clock() - load.started >= limit]
                self._start_loads()
            for load in late:
                message = f"loading the adapter took more than {limit:g} s"
                self._end(load, None, Unavailable(message, retry_after_s=FAILURE_TTL_S))

    def _run(self, load: _Load) -> None:
        self._end(load, *self._read(load))

    def _read(self, load: _Load) -> tuple[AdapterImage | None, LorafleetError | None]:
        def check() -> None:
            if load.is_over:
                raise Unavailable("the load was given up")
            load.progressed = self._clock()

        try:
            image = self._reader.read(WantedImage(*load.key, self._form, check, lambda: load.is_over))
        except LorafleetError as error:
            # it is remembered for a while, and the frames of its traceback have all that was read
            error.__context__ = error.__cause__ = None
            return None, error.with_traceback(None)
        except Exception:
            # a fault of ours, but those who wait must hear of it
            logger.exception("loading adapter %r failed", load.refs[0].name)
            return None, LorafleetError("internal error while the adapter was loaded")
        return image, None

    def _end(self, load: _Load, image: AdapterImage | None, error: LorafleetError | None) -> None:
        with self._lock:
            if load.is_over:
                return
            load.is_over = True
            del self._loads[load.key]
            self._running.remove(load)
            if error is not None:
                self._remember(load.key, error)
            self._start_loads()
            seconds = self._clock() - load.started
        self._hand_over([LoadResult(ref, _named(image, ref), error, seconds) for ref in load.refs])

    def _remember(self, key: Version, error: LorafleetError) -> None:
        now = self._clock()
        self._failures = {other: f for other, f in self._failures.items() if now < f.until}
        ttl = REFUSAL_TTL_S if isinstance(error, AdapterRefused) else FAILURE_TTL_S
        self._failures[key] = _Failure(error, now + ttl)

    def _start_thread(self, target: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        # a daemon: a read that is stuck must not keep the process alive
        thread = threading.Thread(target=run, name="adapter-load", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _hand_over(self, results: list[LoadResult]) -> None:
        for result in results:
            try:
                self._on_done(result)
            except Exception:
                logger.exception("the result of loading adapter %r was not taken", result.ref.name)


def _named(image: AdapterImage | None, ref: AdapterRef) -> AdapterImage | None:
    """The same image, its report with the name that it was asked for by."""
    if image is None:
        return None
    return dataclasses.replace(image, report={**image.report, "adapter": ref.name})
