"""Reads adapters for an engine process: `python -m engine.adapters.load_process FD`, by `remote_reader`.

Reading, hashing and packing are Python in many threads; here they hold no step loop's GIL. Pages are memory
that both processes map: this one asks for some, writes them and tells that they are done. Frames are as in
`engine.wire`. Ends at the end of its stream, so with the engine, however that ends.

engine -> here   config, once, then [call, ...]
                 form [form], and with it the file of pages; before the first read
                 read [number, uri, version], pages [number, page numbers], cancel [number], close []
here -> engine   [event, ...]
                 ready []
                 moved [numbers]: bytes of these loads have; also without any, as a sign of life
                 pages [number, count]: so many are needed
                 failed [number, error]
                 done [number, image, bytes]: its tensors follow the frame. Pages are not written any more
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from engine.adapters.host_memory import HostPages
from engine.adapters.image import ImageFormat
from engine.adapters.image_reader import LocalReader, WantedImage
from engine.adapters.image_wire import decode_form, encode_image
from engine.adapters.page_file import PageFile, raise_fd_limit
from engine.config import EngineConfig
from engine.errors import InvalidRequest, LorafleetError, Unavailable
from engine.wire import encode_frame, read_frame

# boto3 takes half a second to import: here nobody waits for it yet. Without it directories are served
with suppress(ImportError):
    from engine.adapters import s3  # noqa: F401

TELL_S = 0.2  # between two reports of what has moved
BEAT_S = 1.0  # while there are loads, at least so often
NICENESS = 10  # the step loop goes first

logger = logging.getLogger(__name__)


class Load:
    """One read, on its own thread; a source of the pages for its image."""

    def __init__(self, process: LoadProcess, number: int, file: PageFile) -> None:
        self.number = number
        self.given: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()  # pages, or None: given up
        self.is_over = False
        self.has_moved = False  # since it was told
        self._process = process
        self._file = file

    def check(self) -> None:
        if self.is_over:
            raise Unavailable("the load was given up")
        self.has_moved = True

    def take(self, num_pages: int) -> HostPages:
        self.check()
        self._process.send("pages", self.number, num_pages)
        numbers = self.given.get()
        if numbers is None:
            raise Unavailable("the load was given up")
        return HostPages([self._file.page(number) for number in numbers], numbers)

    def cancel(self) -> None:
        self.is_over = True
        self.given.put(None)


class LoadProcess:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # over the sending side
        self._loads: dict[int, Load] = {}
        self._form: ImageFormat
        self._file: PageFile
        self._reader = _open_reader(EngineConfig(**read_frame(sock)))

    def run(self) -> None:
        """Raises EOFError or OSError at the end of the stream."""
        self.send("ready")
        threading.Thread(target=self._tell, name="adapter-moved", daemon=True).start()
        while True:
            call, *args = read_frame(self._sock)
            match call:
                case "form":
                    self._form = decode_form(args[0])
                    _, (fd,), _, _ = socket.recv_fds(self._sock, 1, 1)
                    self._file = PageFile(self._form.page_elems, self._form.dtype, fd)
                case "read":
                    self._start(*args)
                case "pages":
                    number, pages = args
                    if load := self._loads.get(number):
                        load.given.put(pages)
                case "cancel":
                    if load := self._loads.get(args[0]):
                        load.cancel()
                case "close":
                    self._reader.close()
                    return

    def send(self, event: str, *args: Any, content: bytes = b"") -> None:
        with self._lock:
            self._sock.sendall(encode_frame([event, *args]) + content)

    def _start(self, number: int, uri: str, version: str | None) -> None:
        load = self._loads[number] = Load(self, number, self._file)
        thread = threading.Thread(target=self._read, args=(load, uri, version), name="adapter-load")
        thread.start()

    def _read(self, load: Load, uri: str, version: str | None) -> None:
        answer: tuple[Any, ...]
        content = b""
        try:
            form = replace(self._form, arena=load)
            image = self._reader.read(WantedImage(uri, version, form, load.check, lambda: load.is_over))
            header, content = encode_image(image)
            answer = ("done", load.number, header, len(content))
        except LorafleetError as error:
            answer = ("failed", load.number, error.to_dict())
        except Exception:
            logger.exception("loading an adapter failed")
            internal = LorafleetError("internal error while the adapter was loaded")
            answer = ("failed", load.number, internal.to_dict())
        del self._loads[load.number]
        with suppress(OSError):  # the main thread notices as well
            self.send(*answer, content=content)

    def _tell(self) -> None:
        told = time.monotonic()
        while True:
            time.sleep(TELL_S)
            loads = list(self._loads.values())
            moved = [load.number for load in loads if load.has_moved]
            if moved or (loads and time.monotonic() - told >= BEAT_S):
                for load in loads:
                    load.has_moved = False
                with suppress(OSError):
                    self.send("moved", moved)
                told = time.monotonic()


def _open_reader(config: EngineConfig) -> LocalReader:
    try:
        return LocalReader(config)
    except InvalidRequest as error:  # it was good when the engine started
        logger.error("%s: nothing is kept there", error.message)
        return LocalReader(replace(config, disk_cache_dir=None))


def main() -> None:
    # Ctrl-C reaches the whole process group; the engine decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    os.nice(NICENESS)
    raise_fd_limit()
    torch.set_num_threads(1)  # loads are threads already
    sock = socket.socket(fileno=int(sys.argv[1]))
    with suppress(EOFError, OSError):
        LoadProcess(sock).run()
    # threads may hang in a read; nothing of theirs needs to be finished
    os._exit(0)


if __name__ == "__main__":
    main()
