from __future__ import annotations

import pytest

from engine import eviction
from engine.eviction import EvictionOrder, ReloadCosts

HALF_LIFE_S = 10.0


def make(**options: object) -> EvictionOrder:
    return EvictionOrder(half_life_s=HALF_LIFE_S, **options)  # type: ignore[arg-type]


def test_more_uses_are_worth_more_until_they_have_faded() -> None:
    order = make()
    for _ in range(4):
        order.used("often", 0.0)
    order.used("once", 1.9 * HALF_LIFE_S)
    assert order.resident_adapter("often", 8) > order.resident_adapter("once", 8)
    order.used("once more", 2.1 * HALF_LIFE_S)
    assert order.resident_adapter("often", 8) < order.resident_adapter("once more", 8)


def test_a_use_counts_half_after_a_half_life() -> None:
    order = make()
    order.used("a", 0.0)
    order.used("a", HALF_LIFE_S)  # 1 + 1/2
    for _ in range(3):
        order.used("b", 0.0)  # 3, at a time when a's would count 3, too
    assert order.resident_adapter("a", 8) == pytest.approx(order.resident_adapter("b", 8))


def test_the_worth_is_told_a_page() -> None:
    """Copies cost by page and a little each: of two used alike the larger one goes, by little."""
    order = make(costs=ReloadCosts(copy_page_s=1.0, copy_s=2.0))
    order.used("small", 0.0)
    order.used("large", 0.0)
    assert order.resident_adapter("small", 2) == pytest.approx(1.0)  # log2((2 + 2) / 2)
    assert order.resident_adapter("large", 8) == pytest.approx(0.32, abs=0.01)  # log2((8 + 2) / 8)


def test_what_must_come_from_the_source_is_worth_more() -> None:
    order = make(in_host={"host"}, costs=ReloadCosts(copy_page_s=1.0, copy_s=0, read_page_s=8.0, read_s=0))
    for digest in ("host", "gone"):
        order.used(digest, 0.0)
    assert order.resident_adapter("gone", 5) - order.resident_adapter("host", 5) == pytest.approx(3.0)
    # in host memory both would be read again
    assert order.host_image("gone", 5) == order.host_image("host", 5) == order.resident_adapter("gone", 5)


def test_prefix_pages_and_adapters_compare_by_the_seconds_that_they_save() -> None:
    order = make(costs=ReloadCosts(copy_page_s=1.0, copy_s=0.0, prefill_page_s=4.0))
    order.used("a", 2 * HALF_LIFE_S)
    assert order.prefix_page(0.1, reuse=1.0) == pytest.approx(order.resident_adapter("a", 3), abs=0.02)
    assert order.prefix_page(HALF_LIFE_S, reuse=1.0) > order.resident_adapter("a", 3)
    assert order.prefix_page(HALF_LIFE_S, reuse=0.25) < order.resident_adapter("a", 3)


def test_a_load_is_no_use_but_what_is_new_counts_as_used_once() -> None:
    order = make()
    order.used("new", 0.0, count=0.0)
    order.used("used", 0.0)
    assert order.resident_adapter("new", 3) == order.resident_adapter("used", 3)
    order.used("used", 5.0, count=0.0)
    assert order.resident_adapter("new", 3) == pytest.approx(order.resident_adapter("used", 3))


@pytest.mark.parametrize("num_half_lives", [1000, 1080, 10**6])
def test_what_was_last_used_days_ago_can_be_loaded(num_half_lives: int) -> None:
    """Its uses fade below all that a float can tell."""
    order = make()
    order.used("a", 0.0)
    before = order.host_image("a", 1)
    now = num_half_lives * HALF_LIFE_S
    order.used("a", now, count=0.0)
    order.expected("a", now)
    order.used("b", now - 900 * HALF_LIFE_S)
    assert before <= order.host_image("a", 1) < order.host_image("b", 1)
    order.used("a", now)
    assert order.resident_adapter("a", 1) > order.resident_adapter("b", 1)


def test_by_lru_only_the_last_use_counts() -> None:
    order = make(policy="lru", in_host=())
    for _ in range(9):
        order.used("often", 1.0)
    order.used("later", 2.0)
    assert order.resident_adapter("often", 1) == 1.0
    assert order.host_image("later", 99) == order.prefix_page(2.0, reuse=0.1) == 2.0


def test_only_so_many_are_remembered_and_the_forgotten_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MAX_REMEMBERED", 2)
    order = make()
    for now, digest in enumerate("abac"):
        order.used(digest, float(now))
    assert order.resident_adapter("b", 1) < min(order.resident_adapter(d, 9) for d in "ac")


def test_costs_follow_the_size_of_a_page() -> None:
    costs = ReloadCosts().of_pool(page_bytes=1 << 20, page_tokens=64)
    assert costs.copy_page_s == ReloadCosts().copy_page_s / 2
    assert costs.read_page_s == ReloadCosts().read_page_s / 2
    assert costs.prefill_page_s == ReloadCosts().prefill_page_s * 4
