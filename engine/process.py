"""The engine's own process: `python -m engine.process FD`, started by `engine.client`.

HTTP, tokenising and detokenising live in the client's process, adapters are read in a child
(`remote_reader`): none of them holds the step loop's GIL. Three threads: a reader turns frames into calls for
the loop, the loop steps, a writer sends what came out, so that a slow client never stalls a step. The process
ends when its client does.
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
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.adapters.page_file import raise_fd_limit
from engine.adapters.reader_pool import start_readers
from engine.building import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvalidRequest, LorafleetError
from engine.events import TokenEvent
from engine.heap import keep_what_is_there
from engine.loop import EngineLoop, Inbox
from engine.snapshot import SnapshotFeed
from engine.tensor_parallel.group import OnEnd
from engine.wire import decode_choices, decode_ref, encode_event, encode_frame, read_frame

STATS_PERIOD_S = 0.1
BEAT_S = 1.0  # a sign of life at least so often
IDLE_WAIT_S = 1.0

logger = logging.getLogger(__name__)


class EngineProcess:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: Inbox = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stopping = False
        self._turned_at = time.monotonic()

    def run(self) -> None:
        config = EngineConfig(**read_frame(self._sock))
        try:
            core = _build(config, self._inbox, self._end_with_group)
        except (LorafleetError, ValueError, OSError) as error:
            self._send_failure(error)
            return
        geometry = core.geometry
        self._turned_at = time.monotonic()  # what the start took is no step
        self._send(
            {
                "ready": {
                    "max_model_len": geometry.max_model_len,
                    "num_pages": geometry.num_pages,
                    "page_tokens": geometry.page_tokens,
                    "page_bytes": geometry.page_bytes,
                    "vocab_size": geometry.vocab_size,
                }
            }
        )
        writer = threading.Thread(target=self._write, name="engine-writer")
        writer.start()
        threading.Thread(target=self._read, args=(core,), name="engine-reader", daemon=True).start()
        keep_what_is_there()
        try:
            self._loop(EngineLoop(core, self._inbox))
        finally:
            core.close()
            self._outbox.put(None)
            writer.join()

    def _loop(self, loop: EngineLoop) -> None:
        stats_sent = 0.0
        is_stale = True
        feed = SnapshotFeed(loop.core)
        while not self._stopping:
            self._turned_at = time.monotonic()
            events = loop.turn(IDLE_WAIT_S)
            if events:
                self._send({"events": [encode_event(event) for event in events]})
            is_stale = is_stale or loop.has_worked
            now = time.monotonic()
            if is_stale and (loop.core.is_idle or now - stats_sent >= STATS_PERIOD_S):
                self._send({"stats": feed.news()})
                stats_sent, is_stale = now, False

    def _read(self, core: EngineCore) -> None:
        try:
            while True:
                name, *args = read_frame(self._sock)
                self._inbox.put(partial(_CALLS[name], self, core, *args))
        except (EOFError, OSError):
            self._inbox.put(self._stop)

    def _write(self) -> None:
        while (frame := self._next_frame()) is not None:
            try:
                self._sock.sendall(frame)
            except OSError:  # the client is gone; the reader notices as well
                self._inbox.put(self._stop)
                return

    def _next_frame(self) -> bytes | None:
        try:
            return self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
            # a loop that hangs in a step says nothing else; how long is for the client to judge
            return encode_frame({"beat": time.monotonic() - self._turned_at})

    def _send(self, message: Any) -> None:
        self._outbox.put(encode_frame(message))

    def _send_failure(self, error: BaseException) -> None:
        self._sock.sendall(encode_frame({"failed": _as_error(error).to_dict()}))

    def _end_with_group(self, failure: BaseException | None) -> None:
        """The main thread may wait for the other ranks for ever; until all are ready it sends nothing."""
        if failure is not None:
            self._send_failure(failure)
        os._exit(1)

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, core: EngineCore, data: dict[str, Any], choices: list[list[Any]]) -> None:
        for request in decode_choices(data, choices):
            try:
                core.add_request(request)
            except LorafleetError as error:
                self._send({"events": [encode_event(TokenEvent(request.request_id, error=error))]})

    def _abort(self, core: EngineCore, request_id: str) -> None:
        core.abort(request_id)

    def _load(self, core: EngineCore, call_id: str, ref: dict[str, str]) -> None:
        core.load_adapter(call_id, decode_ref(ref))

    def _prefetch(self, core: EngineCore, ref: dict[str, str]) -> None:
        core.prefetch(decode_ref(ref))

    def _unload(self, core: EngineCore, call_id: str, name: str) -> None:
        core.unload_adapter(call_id, name)

    def _pin(self, core: EngineCore, call_id: str, name: str) -> None:
        core.pin_adapter(call_id, name)

    def _unpin(self, core: EngineCore, call_id: str, name: str) -> None:
        core.unpin_adapter(call_id, name)


_CALLS: dict[str, Callable[..., None]] = {
    "add": EngineProcess._add,
    "abort": EngineProcess._abort,
    "load": EngineProcess._load,
    "prefetch": EngineProcess._prefetch,
    "unload": EngineProcess._unload,
    "pin": EngineProcess._pin,
    "unpin": EngineProcess._unpin,
}


def _build(config: EngineConfig, inbox: Inbox, on_group_end: OnEnd) -> EngineCore:
    reader = start_readers(config)  # first: they start while the engine does
    try:
        return build_core(config, inbox, reader, on_group_end)
    except BaseException:
        reader.close()
        raise


def _as_error(error: BaseException) -> LorafleetError:
    return error if isinstance(error, LorafleetError) else InvalidRequest(str(error), param="model")


def main() -> None:
    # Ctrl-C reaches the whole process group; the client decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    raise_fd_limit()
    sock = socket.socket(fileno=int(sys.argv[1]))
    EngineProcess(sock).run()
    sys.stdout.flush()
    # loader threads may hang in a read for minutes; nothing of theirs needs to be finished
    os._exit(0)


if __name__ == "__main__":
    main()
