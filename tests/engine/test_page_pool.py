from __future__ import annotations

import random

import pytest

from engine.page_pool import PREFIX_OWNER, OutOfPages, Owner, PageKind, PagePool

SEQUENCE = Owner(PageKind.SEQUENCE, "request")
ADAPTER = Owner(PageKind.ADAPTER, "digest")


@pytest.mark.parametrize("seed", range(20))
def test_equals_one_set_of_pages_an_owner(seed: int) -> None:
    """Oracle: sets, moved about as the pool is asked to."""
    rng = random.Random(seed)
    pool = PagePool(num_pages := rng.randint(1, 12))
    free = set(range(num_pages))
    owners = [SEQUENCE, Owner(PageKind.SEQUENCE, "other"), ADAPTER, PREFIX_OWNER]
    owned: dict[Owner, set[int]] = {owner: set() for owner in owners}
    for _ in range(200):
        owner, other = rng.sample(owners, 2)
        wanted = rng.randint(0, 5)
        match rng.choice(("allocate", "free", "transfer")):
            case "allocate" if wanted > len(free):
                assert not pool.can_allocate(wanted)
                with pytest.raises(OutOfPages):
                    pool.allocate(owner, wanted)
            case "allocate":
                assert pool.can_allocate(wanted)
                page_ids = pool.allocate(owner, wanted)
                assert len(page_ids) == wanted
                assert set(page_ids) <= free
                owned[owner] |= set(page_ids)
                free -= set(page_ids)
            case "free":
                some = set(rng.sample(sorted(owned[owner]), min(wanted, len(owned[owner]))))
                pool.free(owner, some)
                owned[owner] -= some
                free |= some
            case "transfer" if owned[owner]:
                page_id = owned[owner].pop()
                pool.transfer(page_id, owner, other)
                owned[other].add(page_id)
        pool.check_invariants()
        assert pool.num_free == len(free)
        assert all(pool.pages_of(o) == pages for o, pages in owned.items())
        for kind in PageKind:
            assert pool.num_used(kind) == sum(len(p) for o, p in owned.items() if o.kind is kind)


def test_a_page_is_freed_and_given_away_by_its_owner_only() -> None:
    pool = PagePool(4)
    page_ids = pool.allocate(SEQUENCE, 2)
    with pytest.raises(AssertionError):
        pool.free(ADAPTER, page_ids)
    with pytest.raises(AssertionError):
        pool.transfer(page_ids[0], ADAPTER, PREFIX_OWNER)
    pool.free(SEQUENCE, page_ids)
    with pytest.raises(AssertionError):
        pool.free(SEQUENCE, page_ids)
    pool.check_invariants()
    assert pool.num_free == 4


def test_kv_gets_the_page_freed_last_and_an_adapter_the_one_freed_first() -> None:
    pool = PagePool(4)
    pages = pool.allocate(SEQUENCE, 4)
    for page_id in pages:
        pool.free(SEQUENCE, [page_id])
    assert pool.allocate(SEQUENCE, 1) == pages[3:]
    assert pool.allocate(ADAPTER, 2) == pages[:2]
