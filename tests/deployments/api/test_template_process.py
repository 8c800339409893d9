"""Templates of tenants, in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.api.template_process import TemplateProcess
from deployments.api.template_renderer import RenderError

pytestmark = pytest.mark.anyio

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    started = TemplateProcess()
    yield started
    started.close()


async def render(process: TemplateProcess, source: str, content: str = "hi") -> str:
    return await process.render(source, [{"role": "user", "content": content}], True, {"bos_token": "<s>"})


async def test_renders_text_of_every_script(process: TemplateProcess) -> None:
    text = await render(process, "{{ bos_token }}{{ messages[0].content }}", "ü 語 🎉 \n\r\u2028")
    assert text == "<s>ü 語 🎉 \n\r\u2028"


async def test_failing_template_is_an_error_and_the_next_one_renders(process: TemplateProcess) -> None:
    """FR-57."""
    with pytest.raises(RenderError, match="no system role"):
        await render(process, "{{ raise_exception('no system role') }}")
    assert await render(process, "ok") == "ok"


@pytest.mark.parametrize("source", [ENDLESS, HUGE])
async def test_template_without_an_end_is_cut_off(process: TemplateProcess, source: str) -> None:
    with pytest.raises(RenderError):
        await render(process, source)
    assert await render(process, "ok") == "ok"


async def test_template_that_was_cut_off_is_refused_at_once(process: TemplateProcess) -> None:
    with pytest.raises(RenderError, match="takes too much"):
        await render(process, ENDLESS)
    with pytest.raises(RenderError, match="a short while ago"):
        await render(process, ENDLESS)


async def test_renders_wait_for_each_other_and_not_for_clients_that_left(process: TemplateProcess) -> None:
    tasks = [asyncio.create_task(render(process, "{{ messages[0].content }}", str(n))) for n in range(8)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    texts = await asyncio.gather(*tasks[1::2])
    assert texts == ["1", "3", "5", "7"]


async def test_child_does_not_inherit_our_secrets(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    await render(process, "ok")
    assert process._child is not None
    environment = Path(f"/proc/{process._child.pid}/environ").read_bytes()  # noqa: ASYNC240
    assert b"PATH" in environment
    assert b"secret" not in environment


async def test_closed_before_use_starts_no_child() -> None:
    TemplateProcess().close()


async def test_a_child_that_died_while_idle_is_no_templates_fault(process: TemplateProcess) -> None:
    await render(process, "ok")
    child = process._child
    assert child is not None
    child.kill()
    child.wait()
    assert await render(process, "also ok") == "also ok"
