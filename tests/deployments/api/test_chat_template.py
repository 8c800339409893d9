"""Which template renders, and where."""

from __future__ import annotations

import pytest

from deployments.api.chat_template import ChatTemplates
from deployments.api.protocol import ChatMessage
from deployments.api.template_process import TemplateProcess
from engine.errors import InvalidRequest
from tests.pauses import longest_pause_of_tasks

pytestmark = pytest.mark.anyio

BASE = "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
SLOW = "{% for m in messages %}{% for i in range(300) %}{{ m.content }}{% endfor %}{% endfor %}"
HI = [ChatMessage(role="user", content="hi")]


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TemplateProcess, "render")


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("own", [None, BASE])
async def test_base_template_needs_no_child_even_as_the_adapters_copy(own: str | None) -> None:
    templates = ChatTemplates(BASE, {"bos_token": "<s>"})
    assert await templates.render(own, HI, True) == "<s><hi>"
    templates.close()


@pytest.mark.usefixtures("no_child")
async def test_other_requests_go_on_while_many_messages_are_rendered() -> None:
    templates = ChatTemplates(SLOW, {})

    async def render() -> None:
        assert await templates.render(None, HI * 4000, True) == "hi" * 300 * 4000

    assert await longest_pause_of_tasks(render) < 0.5
    templates.close()


async def test_own_template_sees_the_base_models_special_tokens() -> None:
    templates = ChatTemplates(BASE, {"bos_token": "<s>"})
    assert await templates.render("{{ bos_token }}own", HI, True) == "<s>own"
    templates.close()


@pytest.mark.parametrize(
    ("base", "own"), [(None, None), ("{{ 1 / 0 }}", None), (BASE, "{{ raise_exception('x' * 9999) }}")]
)
async def test_every_failure_is_a_short_error_about_the_messages(base: str | None, own: str | None) -> None:
    """FR-57."""
    templates = ChatTemplates(base, {})
    with pytest.raises(InvalidRequest) as refused:
        await templates.render(own, HI, True)
    assert refused.value.param == "messages"
    assert len(refused.value.message) <= 512
    templates.close()
