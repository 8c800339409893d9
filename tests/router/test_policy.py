"""Placement: warm first, homes that routers agree on, spills only into free capacity."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from router.policy import Choice, ReplicaSnapshot, ResidencyPolicy, rendezvous_order

EMPTY: frozenset[str] = frozenset()


def replica(
    replica_id: str,
    *,
    resident: set[str] | None = None,
    host: set[str] | None = None,
    loading: set[str] | None = None,
    load: int = 0,
    free_slots: int = 4,
    seats: int = 8,
) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        replica_id=replica_id,
        resident=frozenset(resident or ()),
        host=frozenset(host or ()),
        loading=frozenset(loading or ()),
        num_running=min(load, seats),
        num_waiting=max(0, load - seats),
        free_slots=free_slots,
        max_num_seqs=seats,
    )


def policy(slack: int = 4) -> ResidencyPolicy:
    return ResidencyPolicy(Random(0), slack=slack)


def choose(replicas: list[ReplicaSnapshot], adapter: str = "sql") -> Choice:
    return policy().choose(adapter, replicas, now=0.0)


def test_a_resident_adapter_beats_loading_and_host() -> None:
    choice = choose(
        [replica("a", host={"sql"}), replica("b", loading={"sql"}), replica("c", resident={"sql"}, load=7)]
    )
    assert choice.order[0] == "c"
    assert choice.reason == "resident"


def test_a_load_in_flight_is_joined_rather_than_started_elsewhere() -> None:
    choice = choose([replica("a"), replica("b", host={"sql"}), replica("c", loading={"sql"})])
    assert (choice.order[0], choice.reason) == ("c", "loading")


def test_the_host_cache_beats_a_cold_home() -> None:
    choice = choose([replica("a"), replica("b", host={"sql"}), replica("c")])
    assert (choice.order[0], choice.reason) == ("b", "host")


def test_a_cold_adapter_goes_to_the_same_home_from_every_router() -> None:
    replicas = [replica(f"r{i}") for i in range(7)]
    firsts = {choose(order).order[0] for order in (replicas, replicas[::-1], replicas[3:] + replicas[:3])}
    assert len(firsts) == 1
    assert choose(replicas).reason == "home"


def test_a_lost_replica_moves_only_its_own_adapters() -> None:
    replicas = [replica(f"r{i}") for i in range(8)]
    names = [f"adapter-{i}" for i in range(400)]
    before = {name: rendezvous_order(name, replicas)[0].replica_id for name in names}
    after = {name: rendezvous_order(name, replicas[1:])[0].replica_id for name in names}
    assert {n for n in names if before[n] != after[n]} == {n for n in names if before[n] == "r0"}


def test_homes_are_spread_evenly() -> None:
    replicas = [replica(f"r{i}") for i in range(8)]
    homes = [rendezvous_order(f"adapter-{i}", replicas)[0].replica_id for i in range(4000)]
    counts = [homes.count(r.replica_id) for r in replicas]
    assert min(counts) > 400
    assert max(counts) < 600


def test_a_cold_adapter_skips_a_home_without_room() -> None:
    replicas = [replica("a"), replica("b"), replica("c")]
    first, second, _ = rendezvous_order("sql", replicas)
    full = [replace(r, free_slots=0) if r is first else r for r in replicas]
    choice = choose(full)
    assert (choice.order[0], choice.reason) == (second.replica_id, "spill")


def test_a_cold_adapter_with_no_room_anywhere_stays_at_its_home() -> None:
    replicas = [replica(x, free_slots=0) for x in "abc"]
    choice = choose(replicas)
    assert choice.order[0] == rendezvous_order("sql", replicas)[0].replica_id
    assert choice.reason == "home"


def test_a_hot_adapter_spills_into_free_capacity() -> None:
    """FR-60: affinity must not keep a hot adapter on one replica while another one idles."""
    choice = choose([replica("a", resident={"sql"}, load=12), replica("b", load=2)])
    assert (choice.order[0], choice.reason) == ("b", "spill")


def test_a_hot_adapter_waits_rather_than_take_a_slot_in_use() -> None:
    """FR-60: spilling on queue length alone makes load storms."""
    choice = choose([replica("a", resident={"sql"}, load=12), replica("b", load=2, free_slots=0)])
    assert (choice.order, choice.reason) == (("a",), "resident")


def test_a_spill_needs_a_free_seat_and_a_real_difference() -> None:
    assert choose([replica("a", resident={"sql"}, load=20), replica("b", load=8)]).reason == "resident"
    assert choose([replica("a", resident={"sql"}, load=9), replica("b", load=6)]).reason == "resident"
    assert choose([replica("a", resident={"sql"}, load=7), replica("b", load=0)]).reason == "resident"


def test_a_spill_prefers_the_replica_that_has_it_in_host_memory() -> None:
    replicas = [replica("a", resident={"sql"}, load=12), replica("b"), replica("c"), replica("d")]
    last = rendezvous_order("sql", replicas[1:])[-1]
    replicas = [replace(r, host=frozenset({"sql"})) if r is last else r for r in replicas]
    assert choose(replicas).order[0] == last.replica_id


def test_a_hot_adapter_shares_its_replicas_and_a_calm_one_shrinks_to_its_first_home() -> None:
    """FR-60: it shrinks back."""
    calm = [replica("a", resident={"sql"}, load=2), replica("b", resident={"sql"}, load=0)]
    first = rendezvous_order("sql", calm)[0].replica_id
    assert choose(calm).order[0] == first
    hot = [replace(r, num_running=7 if r.replica_id == first else 1) for r in calm]
    assert choose(hot).order[0] != first


def test_own_placements_count_at_the_moment_of_the_decision() -> None:
    """Two requests for one cold adapter join; two cold adapters do not share the last slot."""
    p = policy()
    replicas = [replica("a", free_slots=1), replica("b", free_slots=1)]
    one = p.choose("one", replicas, now=0.0)
    again = p.choose("one", replicas, now=0.1)
    assert (again.order[0], again.reason) == (one.order[0], "loading")
    two = next(n for n in map(str, range(99)) if rendezvous_order(n, replicas)[0].replica_id == one.order[0])
    assert p.choose(two, replicas, now=0.2).order[0] != one.order[0]


def test_a_placement_is_forgotten_after_its_time() -> None:
    p = policy()
    replicas = [replica("a"), replica("b")]
    p.choose("sql", replicas, now=0.0)
    assert p.choose("sql", replicas, now=2.9).reason == "loading"
    assert p.choose("sql", replicas, now=6.0).reason == "home"


def test_a_reported_placement_takes_its_slot_once() -> None:
    p = policy()
    home = p.choose("sql", [replica("a", free_slots=2)], now=0.0).order[0]
    reported = [replica(home, resident={"sql"}, free_slots=1), replica("z", free_slots=0)]
    assert p.choose("other", reported, now=0.1).order[0] == home


def test_a_request_that_went_elsewhere_counts_there() -> None:
    p = policy()
    replicas = [replica("a"), replica("b")]
    chosen = p.choose("sql", replicas, now=0.0).order[0]
    other = "b" if chosen == "a" else "a"
    p.routed("sql", other, now=2.0)
    assert (p.choose("sql", replicas, now=4.0).order[0], "loading") == (other, "loading")


def test_base_requests_go_to_the_less_loaded_of_two() -> None:
    p = policy()
    replicas = [replica("idle"), replica("busy", load=5)]
    for _ in range(20):
        choice = p.choose(None, replicas, now=0.0)
        assert (choice.order, choice.reason) == (("idle", "busy"), "balance")


def test_base_requests_spread_over_equal_replicas() -> None:
    p = policy()
    replicas = [replica(x) for x in "abcd"]
    firsts = [p.choose(None, replicas, now=0.0).order[0] for _ in range(400)]
    assert all(60 < firsts.count(x) < 140 for x in "abcd")


def test_every_replica_is_offered_for_a_cold_or_base_request() -> None:
    replicas = [replica("a", load=99), replica("b", free_slots=0), replica("c")]
    assert sorted(choose(replicas).order) == ["a", "b", "c"]
    assert sorted(policy().choose(None, replicas, now=0.0).order) == ["a", "b", "c"]


def test_the_callers_own_books_win_over_a_stale_report() -> None:
    stale = replace(replica("a", resident={"sql"}), queue_len=12)
    assert choose([stale, replica("b")]).reason == "spill"
