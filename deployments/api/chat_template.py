"""Which chat template renders a request, and where: the base model's here, an adapter's own in a child.

The base model's template is the operator's choice and is trusted; an adapter's is a tenant's program. Neither
renders many messages on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.api.http_errors import MAX_MESSAGE
from deployments.api.off_loop import off_loop
from deployments.api.protocol import ChatMessage
from deployments.api.template_process import TemplateProcess
from deployments.api.template_renderer import RenderError, TemplateRenderer
from engine.errors import InvalidRequest

PART_CHARS = 16  # to render a message or a part of one takes as long as to tokenise so many


class ChatTemplates:
    def __init__(self, base_template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._base_template = base_template
        self._special_tokens = special_tokens
        self._renderer = TemplateRenderer()
        self._process = TemplateProcess()

    async def render(
        self, own_template: str | None, messages: Sequence[ChatMessage], add_generation_prompt: bool
    ) -> str:
        """With the adapter's own template if it has one. Raises InvalidRequest for every failure of it."""
        template = own_template or self._base_template
        if template is None:
            raise InvalidRequest("the model has no chat template", param="messages")
        size = PART_CHARS * _num_parts(messages)
        given = await off_loop(size, lambda: [message.for_template() for message in messages])
        arguments = (template, given, add_generation_prompt, self._special_tokens)
        try:
            if template == self._base_template:  # adapters often carry a copy of it
                return await off_loop(size, lambda: self._renderer.render(*arguments))
            return await self._process.render(*arguments)
        except RenderError as error:
            raise InvalidRequest(f"chat template: {error}"[:MAX_MESSAGE], param="messages") from error

    def close(self) -> None:
        self._process.close()


def _num_parts(messages: Sequence[ChatMessage]) -> int:
    return sum(len(message.content) if isinstance(message.content, list) else 1 for message in messages)
