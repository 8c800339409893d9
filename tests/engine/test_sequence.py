from __future__ import annotations

import pytest

from engine.page_pool import Owner, PageKind
from engine.prefix_cache import PrefixNode
from engine.sequence import Sequence


def sequence(max_tokens: int = 3, min_tokens: int = 0, digest: str | None = None) -> Sequence:
    return Sequence("r", 0, (1, 2, 3, 4, 5), max_tokens, min_tokens, frozenset({9}), digest)


def test_it_ends_at_its_length() -> None:
    seq = sequence()
    assert [seq.append(t) for t in (6, 7, 8)] == [None, None, "length"]
    assert seq.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert seq.num_outputs == 3


def test_a_stop_token_ends_it_also_as_the_last_one() -> None:
    assert sequence().append(9) == "stop"
    seq = sequence()
    assert [seq.append(t) for t in (6, 7, 9)] == [None, None, "stop"]


def test_a_stop_token_before_min_tokens_does_not_end_it() -> None:
    seq = sequence(max_tokens=9, min_tokens=3)
    assert [seq.append(9) for _ in range(3)] == [None, None, "stop"]


def test_stop_tokens_of_the_prompt_do_not_count() -> None:
    seq = Sequence("r", 0, (9, 9), max_tokens=2, stop_token_ids=frozenset({9}))
    assert seq.append(1) is None


def test_it_starts_on_shared_pages_then_its_own_and_stops_with_its_tokens_kept() -> None:
    seq = sequence(digest="a")
    seq.start([PrefixNode("a", (1, 2), page_id=7, parent=None)], (4, 5), page_tokens=2)
    assert (seq.page_ids.tolist(), seq.own_page_ids) == ([7, 4, 5], (4, 5))
    assert (seq.num_computed, seq.num_cached, seq.num_uncomputed) == (2, 2, 3)
    seq.append(6)
    seq.stop()
    assert not seq.is_running
    assert (seq.num_computed, seq.num_cached, seq.num_uncomputed) == (0, 2, 6)
    seq.start([], (1, 2, 3), page_tokens=2)
    assert seq.num_cached == 2, "what was found at the first admission is what the client is told"


def test_once_it_runs_it_is_not_overtaken_any_more() -> None:
    seq = sequence()
    seq.num_overtaken, seq.blocked_since = 3, 1.0
    seq.start([], (1, 2, 3), page_tokens=2)
    assert seq.num_overtaken == 0
    assert seq.blocked_since is None


def test_its_kv_is_owned_by_the_request_and_named_after_the_adapter() -> None:
    assert sequence().owner == Owner(PageKind.SEQUENCE, "r")
    assert sequence().namespace == ""
    assert sequence(digest="a").namespace == "a"


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 1), ((1,), 0)])
def test_nothing_to_compute_or_to_generate_is_a_fault_of_ours(
    prompt: tuple[int, ...], max_tokens: int
) -> None:
    with pytest.raises(AssertionError):
        Sequence("r", 0, prompt, max_tokens)
