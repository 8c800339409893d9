"""Rank 0's side of a group: a Runner that has the other ranks do the same, and a reader that has them read.

The others are child processes, or connect (`seats`). They get each call of the runner in the order in which
rank 0 makes it, so all compute the same steps; sampling is deterministic, so all sample the same tokens. When
one of them dies, or a step takes longer than `step_timeout_s`, the whole group ends.
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from engine.adapters.image import AdapterImage
from engine.adapters.image_reader import ImageReader, WantedImage
from engine.config import EngineConfig
from engine.errors import LorafleetError, Unavailable
from engine.plan import StepPlan
from engine.runner.base import Runner, SampledToken
from engine.sampling_params import SamplingParams
from engine.tensor_parallel import messages
from engine.tensor_parallel.comm import leave, meet
from engine.tensor_parallel.messages import Kind
from engine.tensor_parallel.plan_wire import PlanEncoder
from engine.tensor_parallel.seats import Child, Seat, accept_guests

logger = logging.getLogger(__name__)

FAILURE_WAIT_S = 1.0
_POLL_S = 0.1
_GRACE_S = 2.0  # from the end of the others to our own, if we still hang in a step

OnEnd = Callable[[BaseException | None], None]
"""Ends this process, which may wait for a rank that is no more. Told why, if that one was never ready."""


class Rank:
    """One of the others."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        seat: Seat,
        rendezvous: str,
        on_death: Callable[[Rank], None],
    ) -> None:
        self.rank = rank
        self.seat = seat
        self.ready: Future[dict[str, Any]] = Future()
        self._on_death = on_death
        self._loads: dict[int, Future[str]] = {}
        # over the sending side: the step loop and loader threads send, finalisers wherever they happen to run
        self._lock = threading.RLock()
        self.send(messages.encode_json(Kind.CONFIG, [asdict(config), rank, rendezvous]))
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def send(self, frame: bytes) -> None:
        with self._lock:
            try:
                self.seat.sock.sendall(frame)
            except OSError:
                return  # its reader tells of the death

    def load(self, number: int, uri: str, version: str | None) -> Future[str]:
        """The digest of the part that it has read."""
        future: Future[str] = Future()
        self._loads[number] = future
        self.send(messages.encode_json(Kind.LOAD, [number, uri, version]))
        return future

    def _read(self) -> None:
        try:
            while True:
                self._take(*messages.read(self.seat.sock))
        except (EOFError, OSError):
            death = Unavailable(f"rank {self.rank} of the replica's group has died")
            waiting: list[Future[Any]] = [self.ready, *self._loads.values()]
            for future in waiting:
                if not future.done():
                    future.set_exception(death)
            self._on_death(self)

    def _take(self, kind: Kind, payload: bytes) -> None:
        message = json.loads(payload)
        if kind is Kind.READY:
            self.ready.set_result(message)
        elif kind is Kind.FAILED:
            self.ready.set_exception(LorafleetError.from_dict(message))
        else:
            number, digest, error = message
            future = self._loads.pop(number)
            if error is None:
                future.set_result(digest)
            else:
                future.set_exception(LorafleetError.from_dict(error))


class Group:
    """All ranks but this one."""

    def __init__(self, config: EngineConfig, on_end: OnEnd) -> None:
        """Starts them; they initialise when this rank does."""
        self._on_end = on_end
        self._is_closing = False
        self._directory = tempfile.TemporaryDirectory(prefix="lorafleet-group-")
        num_ranks = config.tensor_parallel_size
        seats: Sequence[Seat]
        if config.rank_address is None:
            seats = [Child() for _ in range(1, num_ranks)]
            self.rendezvous = f"{self._directory.name}/rendezvous"
        else:
            seats = accept_guests(config.rank_address, num_ranks)
            host = config.rank_address.rpartition(":")[0].strip("[]")
            self._store, self.rendezvous = meet(host)
        self._busy_since: float | None = None
        self._timeout_s = config.step_timeout_s
        self._numbers = itertools.count()
        self._images: dict[int, int] = {}  # id of our part's pages -> number
        self.ranks = [
            Rank(config, rank, seat, self.rendezvous, self._on_death)
            for rank, seat in enumerate(seats, start=1)
        ]
        self._watchdog = threading.Thread(target=self._watch, name="group-watchdog", daemon=True)
        self._watchdog.start()

    def wait_until_ready(self) -> list[dict[str, Any]]:
        """What each rank says of itself. Raises the error of one that cannot serve."""
        return [rank.ready.result() for rank in self.ranks]

    def find_failure(self) -> LorafleetError | None:
        """What another rank cannot serve for: our own error may only be that it has left."""
        for rank in self.ranks:
            with suppress(FutureTimeout):
                error = rank.ready.exception(timeout=FAILURE_WAIT_S)
                if isinstance(error, LorafleetError):
                    return error
        return None

    def send(self, frame: bytes) -> None:
        for rank in self.ranks:
            rank.send(frame)

    def read_image(self, local: ImageReader, wanted: WantedImage) -> AdapterImage:
        """As `ImageReader.read`, each rank its own part; `local` reads ours. Runs on a loader's thread."""
        number = next(self._numbers)
        others = [rank.load(number, wanted.uri, wanted.version) for rank in self.ranks]
        try:
            image = local.read(wanted)
            for other in others:
                if _wait(other, wanted.check) != image.digest:
                    raise Unavailable("the adapter changed at its source meanwhile", retry_after_s=1.0)
        except BaseException:
            self._drop(number)
            raise
        # the others keep their parts for as long as there is ours
        key = id(image.pages)
        self._images[key] = number
        weakref.finalize(image.pages, self._forget, key)
        return image

    def number_of(self, image: AdapterImage) -> int:
        return self._images[id(image.pages)]

    def close(self) -> None:
        self._is_closing = True
        for rank in self.ranks:
            rank.seat.stop()
        self._watchdog.join()
        self._directory.cleanup()

    def enter_step(self) -> None:
        self._busy_since = time.monotonic()

    def leave_step(self) -> None:
        self._busy_since = None

    def _forget(self, key: int) -> None:
        self._drop(self._images.pop(key))

    def _drop(self, number: int) -> None:
        if not self._is_closing:
            self.send(messages.encode_json(Kind.DROP, [number]))

    def _on_death(self, rank: Rank) -> None:
        if not self._is_closing:
            failure = rank.ready.exception()
            logger.error(
                "rank %d has ended, and so does the group: %s", rank.rank, failure or "it was killed"
            )
            self._end(failure)

    def _watch(self) -> None:
        while not self._is_closing:
            time.sleep(_POLL_S)
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._timeout_s:
                logger.error("a step takes more than %.1f s: the group ends", self._timeout_s)
                self._end()
                return

    def _end(self, failure: BaseException | None = None) -> None:
        """The others first: then a step of ours may fail by itself, and tell why."""
        self._is_closing = True
        for rank in self.ranks:
            rank.seat.kill()
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and self._busy_since is not None:
            time.sleep(_POLL_S)
        self._directory.cleanup()
        self._on_end(failure)


class GroupReader:
    """Reads an adapter on all ranks."""

    def __init__(self, group: Group, local: ImageReader) -> None:
        self.read = partial(group.read_image, local)
        self.close = local.close


class GroupRunner:
    """Rank 0's runner; the others run along."""

    def __init__(self, local: Runner, group: Group, with_freed_pages: bool) -> None:
        self.max_in_flight = local.max_in_flight
        self.copy_bytes_per_s = local.copy_bytes_per_s
        self._local = local
        self._group = group
        self._encoder = PlanEncoder(with_freed_pages)
        self._requests: dict[str, int] = {}
        self._numbers = itertools.count()

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        # plans hold int32; none lives through as many others
        number = self._requests[request_id] = next(self._numbers) % (1 << 31)
        # only penalties look at the prompt
        prompt = prompt_token_ids if params.penalizes else ()
        self._group.send(messages.encode_json(Kind.START, [number, params.to_dict(), seed, prompt]))
        self._local.start(request_id, params, seed, prompt_token_ids)

    def finish(self, request_id: str) -> None:
        number = self._requests.pop(request_id, None)
        if number is not None:
            self._encoder.forget(number)
            self._group.send(messages.encode_json(Kind.FINISH, [number]))
        self._local.finish(request_id)

    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        adapters = {load.digest: self._group.number_of(images[load.digest]) for load in plan.loads}
        payload = self._encoder.encode(plan, self._requests, adapters)
        self._group.enter_step()  # to send waits, too, for a rank that hangs
        self._group.send(messages.encode(Kind.STEP, payload))
        self._local.submit(plan, images)
        self._group.leave_step()

    def collect(self) -> list[SampledToken]:
        self._group.enter_step()
        sampled = self._local.collect()
        self._group.leave_step()
        return sampled

    def close(self) -> None:
        self._group.close()
        self._local.close()
        leave()


def _wait(future: Future[str], check: Callable[[], None]) -> str:
    while True:
        try:
            return future.result(timeout=_POLL_S)
        except FutureTimeout:
            check()
