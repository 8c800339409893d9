"""Which chat template renders a request, and where: the base model's here, an adapter's own in a child.

The base model's template is the operator's choice and is trusted; an adapter's is a tenant's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.api.http_errors import MAX_MESSAGE
from deployments.api.template_process import TemplateProcess
from deployments.api.template_renderer import RenderError, TemplateRenderer
from engine.errors import InvalidRequest


class ChatTemplates:
    def __init__(self, base_template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._base_template = base_template
        self._special_tokens = special_tokens
        self._renderer = TemplateRenderer()
        self._process = TemplateProcess()

    async def render(
        self, own_template: str | None, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
    ) -> str:
        """With the adapter's own template if it has one. Raises InvalidRequest for every failure of it."""
        template = own_template or self._base_template
        if template is None:
            raise InvalidRequest("the model has no chat template", param="messages")
        try:
            if template == self._base_template:  # adapters often carry a copy of it
                return self._renderer.render(template, messages, add_generation_prompt, self._special_tokens)
            return await self._process.render(template, messages, add_generation_prompt, self._special_tokens)
        except RenderError as error:
            raise InvalidRequest(f"chat template: {error}"[:MAX_MESSAGE], param="messages") from error

    def close(self) -> None:
        self._process.close()
