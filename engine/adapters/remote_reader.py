"""The engine process's side of `load_process`: reads adapters there, so that the step loop has its GIL.

A thread that waits for an image sleeps until it is there; one thread listens for all. A load that is given up
keeps its pages until the other process has answered for it, or is dead: it may still write them.
"""

from __future__ import annotations

import itertools
import logging
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from engine.adapters.host_memory import HostArena, HostPages
from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.image_reader import WantedImage, open_disk_cache
from engine.adapters.image_wire import decode_image, encode_form
from engine.config import EngineConfig
from engine.errors import LorafleetError, Unavailable
from engine.wire import encode_frame, read_exactly, read_frame

RETRY_AFTER_S = 5.0
START_TIMEOUT_S = 60.0
MAX_DELAY_S = 30.0  # before it is started once more
CLOSE_TIMEOUT_S = 5.0  # to write what is pending to the disk cache
_TICK_S = 0.2  # between two looks at which loads are still wanted
_IDLE_S = 1.0

logger = logging.getLogger(__name__)


class _PagesWanted(NamedTuple):
    num_pages: int


class _Done(NamedTuple):
    header: dict[str, Any]
    content: bytes  # of its tensors


@dataclass(slots=True, eq=False)
class _Load:
    number: int
    arena: HostArena
    wanted: WantedImage
    # what the thread that waits hears of
    events: queue.SimpleQueue[_PagesWanted | _Done | Exception] = field(default_factory=queue.SimpleQueue)
    pages: HostPages | None = None
    is_given_up: bool = False


class LoadChild:
    """One process, from its start to its death."""

    def __init__(self, config: EngineConfig, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._keeps = config.disk_cache_dir is not None
        self._patience_s = config.heartbeat_timeout_s
        self._lock = threading.Lock()  # over the sending side and what follows
        self._loads: dict[int, _Load] = {}
        self._numbers = itertools.count()
        self._has_form = False
        self.is_dead = False
        self._is_ready = False
        self._heard = time.monotonic()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.adapters.load_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        # also in the midst of what it says
        seconds, part = divmod(config.heartbeat_timeout_s, 1)
        self._sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(part * 1e6))
        )
        self._send(encode_frame(asdict(config)))
        self._thread = threading.Thread(target=self._listen, name="adapter-listener", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, wanted: WantedImage) -> AdapterImage:
        """As `ImageReader`; the form is the same each time, with a HostArena."""
        arena = wanted.form.arena
        assert isinstance(arena, HostArena)
        load = _Load(next(self._numbers), arena, wanted)
        with self._lock:
            if self.is_dead:
                raise _died()
            if not self._loads:
                self._heard = time.monotonic()
            self._loads[load.number] = load
            if not self._has_form:
                self._send_form(wanted.form, arena)
            self._send(encode_frame(["read", load.number, wanted.uri, wanted.version]))
        try:
            return self._attend(load)
        except BaseException:
            self._give_up(load)
            raise

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            if self._keeps and self._is_ready:
                self._tell("close")
                self._process.wait(CLOSE_TIMEOUT_S)
        self._process.kill()
        self._thread.join()

    def _attend(self, load: _Load) -> AdapterImage:
        while True:
            match load.events.get():
                case _PagesWanted(num_pages):
                    # here, not where others are listened to: it may have to lock fresh memory for the GPU
                    load.pages = load.arena.take(num_pages)
                    self._tell("pages", load.number, load.pages.numbers)
                case _Done(header, content):
                    assert load.pages is not None
                    return decode_image(header, content, load.pages)
                case error:
                    raise error

    def _give_up(self, load: _Load, error: Exception | None = None) -> None:
        """It stays among the loads, and with it its pages, until the other side has answered."""
        if load.number in self._loads and not load.is_given_up:
            load.is_given_up = True
            self._tell("cancel", load.number)
            if error is not None:
                load.events.put(error)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        try:
            while True:
                if poll.poll((_TICK_S if self._loads else _IDLE_S) * 1000):
                    self._take(*read_frame(self._sock))
                self._look()
        except (EOFError, OSError):
            pass
        finally:
            self._end()

    def _take(self, event: str, *args: Any) -> None:
        self._heard = time.monotonic()
        match event:
            case "ready":
                self._is_ready = True
            case "moved":
                for number in args[0]:
                    self._moved(number)
            case "pages":
                number, count = args
                self._loads[number].events.put(_PagesWanted(count))
            case "failed":
                number, error = args
                self._forget(number).events.put(LorafleetError.from_dict(error))
            case "done":
                number, header, size = args
                content = read_exactly(self._sock, size)
                self._forget(number).events.put(_Done(header, content))
            case _:
                raise AssertionError(event)

    def _moved(self, number: int) -> None:
        load = self._loads.get(number)
        if load is None:
            return  # it was done before that was told
        try:
            load.wanted.check()
        except Exception as error:
            self._give_up(load, error)

    def _look(self) -> None:
        """Give up what nobody wants any more; end a process that hangs."""
        for load in list(self._loads.values()):
            if load.wanted.is_over():
                self._give_up(load, Unavailable("the load was given up"))
        patience_s = self._patience_s if self._is_ready else START_TIMEOUT_S
        if self._loads and time.monotonic() - self._heard > patience_s:
            logger.error("the process that reads adapters gives no sign of life: it is ended")
            self._process.kill()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()  # from here on it writes no page
        self._on_death()
        with self._lock:
            self.is_dead = True
            loads = list(self._loads.values())
            self._loads.clear()
            self._sock.close()
        for load in loads:
            load.events.put(_died())

    def _forget(self, number: int) -> _Load:
        with self._lock:
            return self._loads.pop(number)

    def _tell(self, call: str, *args: Any) -> None:
        with self._lock:
            self._send(encode_frame([call, *args]))

    def _send_form(self, form: ImageFormat, arena: HostArena) -> None:
        self._send(encode_frame(["form", encode_form(form)]))
        with suppress(OSError):
            socket.send_fds(self._sock, [b"\0"], [arena.file.fd])
        self._has_form = True

    def _send(self, frame: bytes) -> None:
        with suppress(OSError):  # the listener notices that it is dead
            self._sock.sendall(frame)


class RemoteReader:
    """An ImageReader. When its process dies, its loads fail, and the next one starts another process."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the process, which takes a while to be ready. Raises InvalidRequest as LocalReader does."""
        if open_disk_cache(config) is None:
            config = replace(config, disk_cache_dir=None)
        self._config = config
        self._lock = threading.Lock()  # over what follows
        self._is_closed = False
        self._num_deaths = 0  # since a load ended well
        self._not_before = 0.0  # is another one started
        self._child = LoadChild(config, self._on_death)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_resting(self) -> bool:
        """Its process keeps ending, and for a while no other is started."""
        return self._child.is_dead and time.monotonic() < self._not_before

    def read(self, wanted: WantedImage) -> AdapterImage:
        image = self._living_child().read(wanted)
        self._num_deaths = 0
        return image

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._child.close()

    def _living_child(self) -> LoadChild:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the engine is closing")
            if self._child.is_dead:
                delay = self._not_before - time.monotonic()
                if delay > 0:
                    raise Unavailable("the process that reads adapters keeps ending", retry_after_s=delay)
                self._child = LoadChild(self._config, self._on_death)
            return self._child

    def _on_death(self) -> None:
        """The first time another one may start at once, then after 1, 2, 4 ... s."""
        if self._is_closed:
            return
        logger.error("the process that reads adapters has ended")
        self._num_deaths += 1
        delay = 0.0 if self._num_deaths == 1 else min(MAX_DELAY_S, 2.0 ** (self._num_deaths - 2))
        self._not_before = time.monotonic() + delay


def _died() -> Unavailable:
    return Unavailable("the process that reads adapters has ended", retry_after_s=RETRY_AFTER_S)
