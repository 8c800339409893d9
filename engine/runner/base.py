"""What the engine asks of a device. Knows nothing of queues or adapters' sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.plan import StepPlan
from engine.request import TokenLogprob
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage


@dataclass(frozen=True, slots=True)
class SampledToken:
    request_id: str
    token_id: int
    logprob: TokenLogprob | None  # if asked for


class Runner(Protocol):
    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        """Set up sampling; called once, before the request's first chunk."""

    def finish(self, request_id: str) -> None:
        """Forget it; the request may never have been started."""

    def execute(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> list[SampledToken]:
        """Run one step; a token for every chunk that samples.

        A plan may have no chunks. `images`: of its loads.
        """
