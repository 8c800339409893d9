"""What the router reads from Serve's values: a replica's stats, and a request's arguments."""

from __future__ import annotations

from math import inf
from typing import Any

from ray.serve.request_router import PendingRequest

from engine.stats import BASE
from engine.step_cost import StepCost
from router.fleet_table import UNKNOWN_COST, Report
from router.hints import Waiting
from router.policy import RouteRequest

BASE_ID = BASE  # a call without an id would get another request's replica
PREFIX_TOKENS = 64  # prompts that agree in so many may share pages of the prefix cache


def read_report(stats: dict[str, Any], metadata: dict[str, Any]) -> Report:
    """See `deployments.replica_books.routing_stats`."""
    free_slots = stats.get("free_slots", metadata.get("max_adapters", 1))
    cost = stats.get("step_cost")
    return Report(
        resident=frozenset(stats.get("resident", ())),
        loading=frozenset(stats.get("loading", ())),
        host=frozenset(stats.get("host", ())),
        num_requests=stats.get("running", 0) + stats.get("waiting", 0),
        free_slots=free_slots,
        idle_slots=stats.get("idle_slots", free_slots),
        queued_tokens=stats.get("queued_tokens", 0),
        lora_pages=stats.get("lora_pages", 0),
        adapter_pages=stats.get("adapter_pages", 0),
        cost=StepCost(*cost) if cost else UNKNOWN_COST,
    )


def read_adapter(pending_request: PendingRequest) -> str | None:
    """None: the base model."""
    model_id: str = pending_request.metadata.multiplexed_model_id
    return None if model_id in ("", BASE_ID) else model_id


def read_request(pending_request: PendingRequest) -> RouteRequest:
    tokens = _body(pending_request).get("prompt_token_ids", ())
    prefix = hash(tuple(tokens[:PREFIX_TOKENS])) if tokens else 0  # of ints: the same in every process
    return RouteRequest(read_adapter(pending_request), len(tokens), prefix)


def read_waiting(pending_request: PendingRequest) -> Waiting | None:
    """None where there is no adapter that a replica could be told of."""
    request, ref = read_request(pending_request), _body(pending_request).get("adapter")
    return Waiting(request, ref) if ref and request.adapter is not None else None


def read_timeout_s(pending_request: PendingRequest) -> float:
    """For its first token, of what is left."""
    timeout_s = _body(pending_request).get("timeout_s")
    return inf if timeout_s is None else timeout_s


def take_time(pending_request: PendingRequest, seconds: float) -> None:
    """They are gone before its replica hears of it. Modifies the request."""
    body = _body(pending_request)
    if body.get("timeout_s") is not None:
        body["timeout_s"] -= seconds


def _body(pending_request: PendingRequest) -> dict[str, Any]:
    """The first argument is a request as `engine.wire` encodes it, if it is one at all."""
    body = pending_request.args[0] if pending_request.args else None
    return body if isinstance(body, dict) else {}
