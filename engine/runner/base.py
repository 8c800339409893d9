"""What the engine asks of a device. Knows nothing of queues or adapters' sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.plan import StepPlan
from engine.request import TokenLogprob
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage


class SampledToken(NamedTuple):
    request_id: str
    token_id: int
    logprob: TokenLogprob | None  # if asked for


class Runner(Protocol):
    max_in_flight: int
    """Steps submitted and not collected, at most. 1: nothing is gained by submitting ahead."""

    copy_bytes_per_s: float
    """Of adapters from host memory to the device, beside the steps. inf: at once."""

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        """Set up sampling; called once, before the request's first chunk."""

    def finish(self, request_id: str) -> None:
        """Forget it; the request may never have been started, and steps in flight may still compute it."""

    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        """Start one step behind those in flight.

        A plan may have no chunks. `images`: of its loads.
        """

    def collect(self) -> list[SampledToken]:
        """Wait for the oldest step in flight; a token for every chunk of it that samples, in any order."""

    def close(self) -> None:
        """End what it has started besides itself; no step is in flight."""
