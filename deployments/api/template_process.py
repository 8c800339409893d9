"""A child process that renders the templates that adapters bring. Knows nothing of jinja or HTTP.

One thread owns the child and serves one render at a time. A template that runs into the child's limits ends
the child; it is then refused for a while, so that one tenant cannot keep the others' templates waiting.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deployments.api import template_renderer
from deployments.api.template_renderer import READY, RenderError

REFUSE_S = 60.0
MAX_REFUSED = 1024  # templates remembered


class TemplateProcess:
    """Starts its child at the first render. `close` ends it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-template")
        # the thread's own
        self._child: subprocess.Popen[str] | None = None
        self._refused_until: dict[str, float] = {}  # by template

    async def render(
        self,
        source: str,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        """Raises RenderError."""
        request = {
            "source": source,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "special_tokens": dict(special_tokens),
        }
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._render, source, request)

    def close(self) -> None:
        self._thread.submit(self._end_child)
        self._thread.shutdown()

    def _render(self, source: str, request: Mapping[str, Any]) -> str:
        if time.monotonic() < self._refused_until.get(source, 0.0):
            raise RenderError("it took too much time or memory a short while ago")
        reply = self._ask(request)
        if reply is None:
            self._end_child()
            self._refuse(source, time.monotonic())
            raise RenderError("it takes too much time or memory")
        if "error" in reply:
            raise RenderError(reply["error"])
        text: str = reply["text"]
        return text

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """None if the child died of it."""
        if self._child is not None and self._child.poll() is not None:
            self._end_child()  # it died while it had nothing to do: no template's fault
        child = self._child = self._child or _start_child()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            return None
        line = child.stdout.readline()
        reply: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return reply

    def _refuse(self, source: str, now: float) -> None:
        if len(self._refused_until) >= MAX_REFUSED:
            self._refused_until.pop(next(iter(self._refused_until)))
        self._refused_until[source] = now + REFUSE_S

    def _end_child(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.communicate()  # reaps it and closes the pipes
        self._child = None


def _start_child() -> subprocess.Popen[str]:
    # isolated, and without our environment: it may hold credentials
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH")}
    child = subprocess.Popen(
        [sys.executable, "-I", template_renderer.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env=environment,
    )
    assert child.stdout is not None
    if child.stdout.readline() != READY:
        child.kill()
        child.communicate()
        raise RuntimeError("the chat template process did not start")
    return child
