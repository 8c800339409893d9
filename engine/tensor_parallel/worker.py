"""A rank of a group but the first: `python -m engine.tensor_parallel.worker FD`, or HOST:PORT RANK (`seats`).

One thread does what rank 0 does, call by call; adapters are read in a process of their own. This one ends at
the end of its stream, so with rank 0, however that ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.image_reader import ImageReader, WantedImage
from engine.adapters.manager import STALL_FACTOR
from engine.adapters.page_file import raise_fd_limit
from engine.adapters.reader_pool import start_readers
from engine.building import BuiltRank, build_rank
from engine.config import EngineConfig
from engine.errors import InvalidRequest, LorafleetError
from engine.heap import keep_what_is_there
from engine.sampling_params import SamplingParams
from engine.sharding import Shard
from engine.tensor_parallel import messages
from engine.tensor_parallel.comm import leave
from engine.tensor_parallel.messages import Kind
from engine.tensor_parallel.plan_wire import PlanDecoder
from engine.tensor_parallel.seats import connect

logger = logging.getLogger(__name__)

FAILED_GRACE_S = 5.0


class Worker:
    def __init__(self, sock: socket.socket, built: BuiltRank, num_loads: int, reader: ImageReader) -> None:
        self._sock = sock
        self._reader = reader
        self._runner = built.runner
        self._form: ImageFormat = built.form
        self._decoder = PlanDecoder()
        self._num_in_flight = 0
        # as many as rank 0 has at once
        self._loads = ThreadPoolExecutor(STALL_FACTOR * num_loads, thread_name_prefix="adapter-load")
        self._lock = threading.Lock()  # over what is below, and the sending side
        self._images: dict[int, AdapterImage] = {}
        self._reading: set[int] = set()  # numbers that rank 0 has not dropped

    def run(self) -> None:
        """Raises EOFError at the end of the stream."""
        while True:
            kind, payload = messages.read(self._sock)
            if kind is Kind.STEP:
                self._step(payload)
            else:
                self._call(kind, json.loads(payload))

    def _step(self, payload: bytes) -> None:
        plan = self._decoder.decode(payload)
        images = {load.digest: self._images[int(load.digest)] for load in plan.loads}
        self._runner.submit(plan, images)
        self._num_in_flight += 1
        # as EngineCore does
        while self._num_in_flight >= (self._runner.max_in_flight if plan.chunks else 1):
            self._runner.collect()
            self._num_in_flight -= 1

    def _call(self, kind: Kind, message: list[Any]) -> None:
        match kind:
            case Kind.START:
                number, params, seed, prompt = message
                self._runner.start(str(number), SamplingParams.from_dict(params), seed, tuple(prompt))
            case Kind.FINISH:
                self._decoder.forget(message[0])
                self._runner.finish(str(message[0]))
            case Kind.LOAD:
                with self._lock:
                    self._reading.add(message[0])
                self._loads.submit(self._load, *message)
            case Kind.DROP:
                self._drop(message[0])
            case _:
                raise AssertionError(kind)

    def _load(self, number: int, uri: str, version: str | None) -> None:
        def is_dropped() -> bool:
            return number not in self._reading

        digest, error = None, None
        try:
            image = self._reader.read(WantedImage(uri, version, self._form, is_over=is_dropped))
        except LorafleetError as e:
            error = e.to_dict()
        except Exception:
            logger.exception("reading a rank's part of adapter load %d failed", number)
            error = LorafleetError("internal error while the adapter was loaded").to_dict()
        else:
            digest = image.digest
        with self._lock:
            if number in self._reading and error is None:
                self._images[number] = image
            self._reading.discard(number)
            self._sock.sendall(messages.encode_json(Kind.LOADED, [number, digest, error]))

    def _drop(self, number: int) -> None:
        """Rank 0 has freed its part, or could not read it."""
        with self._lock:
            self._images.pop(number, None)
            self._reading.discard(number)


def _end_with(sock: socket.socket) -> None:
    """While this rank is built nobody reads its stream, and it may wait half an hour for a dead rank 0.

    The first byte, which comes after that, is left to the main thread.
    """
    with suppress(OSError):
        if sock.recv(1, socket.MSG_PEEK):
            return
    os._exit(0)


def _fail(sock: socket.socket, refusal: LorafleetError) -> None:
    """Rank 0 ends us when it has read that; if it hangs without us, our end is its end."""
    sock.sendall(messages.encode_json(Kind.FAILED, refusal.to_dict()))
    leave()  # what it may be waiting for, in the middle of a collective, fails now
    sock.settimeout(FAILED_GRACE_S)
    with suppress(EOFError, OSError):
        messages.read(sock)


def main() -> None:
    # Ctrl-C reaches the whole process group; rank 0 decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if len(sys.argv) == 3:
        serve(connect(sys.argv[1], int(sys.argv[2])))
    else:
        serve(socket.socket(fileno=int(sys.argv[1])))


def serve(sock: socket.socket) -> None:
    """Build what rank 0 says and do what it does; ends the process at the end of the stream."""
    assert array("i").itemsize == 4
    raise_fd_limit()
    try:
        _, payload = messages.read(sock)
    except (EOFError, OSError):
        return  # rank 0 has failed, or turned us away
    settings, rank, rendezvous = json.loads(payload)
    config = EngineConfig(**settings)
    threading.Thread(target=_end_with, args=(sock,), name="rank-0-watch", daemon=True).start()
    # first: it starts while the rank is built. Only rank 0 keeps what was read on disk
    reader = start_readers(replace(config, disk_cache_dir=None))
    try:
        built = build_rank(config, Shard(rank, config.tensor_parallel_size), rendezvous)
    except (LorafleetError, ValueError, OSError) as error:
        refusal = error if isinstance(error, LorafleetError) else InvalidRequest(str(error), param="model")
        _fail(sock, refusal)
        return
    keep_what_is_there()
    sock.sendall(messages.encode_json(Kind.READY, {"num_pages": built.geometry.num_pages}))
    code = 1
    try:
        Worker(sock, built, config.max_parallel_loads, reader).run()
    except EOFError:
        code = 0
    except Exception:
        logger.exception("rank %d cannot go on", rank)
    # threads may hang in a read; nothing of theirs needs to be finished
    os._exit(code)


if __name__ == "__main__":
    main()
