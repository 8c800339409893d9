"""What one replica knows of its own requests, and what it tells the router. Pure: time comes in as `now`.

The engine counts tokens, pages and loads; this counts what only the replica sees: why requests were routed
here, how long they waited for their first token, how they ended, and when each adapter was last in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from deployments.label_cap import DEFAULT_MAX_NAMES, LabelCap
from deployments.request_times import RequestTimes
from engine.latecomers import Latecomers
from engine.stats import BASE, Histogram

# an adapter that nobody has asked for lately can give its slot to another one
UNUSED_AFTER_S = 10.0
# and one that nobody has asked for so long need not be warm elsewhere when its replica goes
UNWANTED_AFTER_S = 60.0
MAX_WANTED = 256  # the latest used ones
# adapters that the router is told of: the latest used ones of a tier. Serve gives routers whole values and
# may skip some, so there are no deltas; one not named is found by its home, where routers sent it before
MAX_NAMED = {"hbm": 256, "loading": 64, "host": 128}
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TPOT_BOUNDS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
E2E_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
ABORT, ERROR = "abort", "error"  # why a request ended, beside the finish reasons of its choices


@dataclass(slots=True)
class AdapterBook:
    in_flight: int = 0
    is_unloaded: bool = False  # its series end with the last request that is in flight
    last_used: float = 0.0
    ttft_seconds_sum: float = 0.0
    ttft_count: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)  # by reason


_NEVER = AdapterBook(last_used=float("-inf"))


class ReplicaBooks:
    def __init__(self, max_names: int = DEFAULT_MAX_NAMES) -> None:
        self._cap = LabelCap(max_names)
        self._adapters: dict[str, AdapterBook] = {}
        self._unloaded = Latecomers()
        self._routes: dict[str, int] = {}
        self._num_misroutes = 0
        self._ttft = Histogram(TTFT_BOUNDS_S)
        self._tpot = Histogram(TPOT_BOUNDS_S)
        self._e2e = Histogram(E2E_BOUNDS_S)

    def arrived(self, adapter: str, route: str, now: float) -> None:
        book = self._adapters.setdefault(adapter, AdapterBook())
        book.in_flight += 1
        book.is_unloaded = self.was_unloaded(adapter, now)
        book.last_used = now
        self._routes[route] = self._routes.get(route, 0) + 1

    def misrouted(self) -> None:
        """The router took the adapter to be resident here, and it is not."""
        self._num_misroutes += 1

    def first_token(self, adapter: str, waited_s: float) -> None:
        book = self._adapters[adapter]
        book.ttft_seconds_sum += waited_s
        book.ttft_count += 1
        self._ttft.observe(waited_s)

    def ended(self, adapter: str, now: float, error: str | None) -> None:
        """`error` is the code of the error that ended it, if one did."""
        book = self._adapters[adapter]
        book.in_flight -= 1
        book.last_used = now
        if error is not None:
            book.errors[error] = book.errors.get(error, 0) + 1
        if book.is_unloaded and book.in_flight == 0:
            del self._adapters[adapter]

    def finished(self, adapter: str, times: RequestTimes, is_error: bool) -> None:
        """Before `ended`. Only requests that were answered whole count in the durations."""
        reason = ERROR if is_error else times.finish_reason or ABORT
        counts = self._adapters[adapter].finished
        counts[reason] = counts.get(reason, 0) + 1
        if reason in (ABORT, ERROR):
            return
        self._e2e.observe(times.last - times.arrived)
        if times.seconds_per_token is not None:
            self._tpot.observe(times.seconds_per_token)

    def loaded(self, adapter: str) -> None:
        """On purpose: its series go on."""
        self._unloaded.discard(adapter)
        if adapter in self._adapters:
            self._adapters[adapter].is_unloaded = False

    def was_unloaded(self, adapter: str, now: float) -> bool:
        """A moment ago, so that who asks for it now was on his way already."""
        return self._unloaded.is_late(adapter, now)

    def forget(self, adapter: str, now: float) -> None:
        """It was unloaded: its series end."""
        self._unloaded.expect(adapter, now)
        book = self._adapters.get(adapter)
        if book is not None and book.in_flight == 0:
            del self._adapters[adapter]
        elif book is not None:
            book.is_unloaded = True

    def in_use(self) -> set[str]:
        return {name for name, book in self._adapters.items() if book.in_flight} - {BASE}

    def wanted(self, now: float) -> list[str]:
        """Adapters that had requests lately, or have some."""
        names = {
            name
            for name, book in self._adapters.items()
            if book.in_flight or now - book.last_used <= UNWANTED_AFTER_S
        }
        return self.latest(names - {BASE}, MAX_WANTED)

    def latest(self, adapters: set[str], count: int) -> list[str]:
        """Those used latest, sorted by name; in use is latest."""
        if len(adapters) <= count:
            return sorted(adapters)

        def last_used(name: str) -> tuple[bool, float, str]:
            book = self._adapters.get(name, _NEVER)
            return bool(book.in_flight), book.last_used, name

        return sorted(nlargest(count, adapters, last_used))

    def is_unused(self, adapter: str, now: float) -> bool:
        book = self._adapters.get(adapter)
        return book is None or (book.in_flight == 0 and now - book.last_used > UNUSED_AFTER_S)

    def merge_into(self, stats: dict[str, Any], names_all: bool = False) -> dict[str, Any]:
        """The engine's statistics with ours beside them. `stats` stays as it is."""
        adapters = {name: dict(entry) for name, entry in stats.get("adapters", {}).items()}
        tiers = {name: entry["tier"] for name, entry in adapters.items() if entry.get("tier")}
        for name, book in self._adapters.items():
            adapters.setdefault(name, {}).update(
                ttft_seconds_sum=book.ttft_seconds_sum,
                ttft_count=book.ttft_count,
                errors=dict(book.errors),
                finished=dict(book.finished),
            )
        return {
            **stats,
            "adapters": adapters if names_all else self._cap.fold(adapters),
            "resident": sorted(name for name, tier in tiers.items() if tier == "hbm"),
            "awaited": sorted(n for n, tier in tiers.items() if tier != "hbm" and adapters[n].get("waiting")),
            "routes": dict(self._routes),
            "stale_misroutes": self._num_misroutes,
            "num_host": sum(tier == "host" for tier in tiers.values()),
            "ttft_seconds": self._ttft.to_dict(),
            "tpot_seconds": self._tpot.to_dict(),
            "e2e_seconds": self._e2e.to_dict(),
        }


def routing_stats(stats: dict[str, Any], books: ReplicaBooks, now: float) -> dict[str, Any]:
    """What the router needs: bounded, sorted and coarse, because any change goes to every router."""
    adapters = stats.get("adapters", {})
    tiers: dict[str, set[str]] = {"hbm": set(), "loading": set(), "host": set()}
    for name, entry in adapters.items():
        if entry.get("tier") in tiers:
            tiers[entry["tier"]].add(name)
    # whatever is asked for and not there is on its way
    tiers["loading"] = (tiers["loading"] | books.in_use()) - tiers["hbm"]
    tiers["host"] -= tiers["loading"]
    pages = stats.get("pages", {})
    grain = max(1, stats.get("max_num_seqs", 1) // 8)
    named = {tier: books.latest(names, MAX_NAMED[tier]) for tier, names in tiers.items()}
    cost = stats.get("step_cost")
    return {
        "resident": named["hbm"],
        "loading": named["loading"],
        "host": named["host"],
        "running": _round_up(stats.get("running", 0), grain),
        "waiting": _round_up(stats.get("waiting", 0), grain),
        **_room(stats, tiers["hbm"], len(tiers["loading"]), books, now),
        "queued_tokens": _coarse(stats.get("tokens", {}).get("queued", 0)),
        "lora_pages": _coarse(stats.get("lora_pages", 0)),
        "adapter_pages": _coarse(pages.get("adapters", 0) // max(1, len(tiers["hbm"]))),
        "step_cost": cost and [float(f"{value:.1e}") for value in cost],
    }


def _room(
    stats: dict[str, Any], resident: set[str], num_loading: int, books: ReplicaBooks, now: float
) -> dict[str, int]:
    """Adapters that fit without giving up one that was used lately, or one that is in use now."""
    slots, pages, adapters = stats.get("slots", {}), stats.get("pages", {}), stats.get("adapters", {})
    movable = [name for name in resident if not adapters[name].get("pinned")]
    in_use = books.in_use()
    idle = sum(name not in in_use for name in movable)
    unused = sum(books.is_unused(name, now) for name in movable)
    free = slots.get("total", 1) - slots.get("used", 0)
    if resident and pages:
        size = max(1, pages["adapters"] // len(resident))
        free = min(free, (pages["free"] + pages["prefix"]) // size)
    return {"free_slots": free + unused - num_loading, "idle_slots": free + idle - num_loading}


def _round_up(value: int, grain: int) -> int:
    return -(-value // grain) * grain


def _coarse(value: int) -> int:
    """Up to the next number of two binary digits and zeros: 1, 2, 3, 4, 6, 8, 12, ..."""
    return _round_up(value, 1 << max(0, value.bit_length() - 2))
