"""Records become figures, and figures a verdict."""

from __future__ import annotations

import pytest

from load_tests.harness.client import Record
from load_tests.harness.summary import Limits, Slo, difference, lookups, missed, percentile, summarise

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def record(
    ttft_s: float = 0.5, tpot_s: float = 0.05, num: int = 11, group: str = "all", error: str | None = None
) -> Record:
    if error:
        return Record(0.0, "a", group, 3, sent=0.01, error=error)
    last = 0.01 + ttft_s + tpot_s * (num - 1)
    return Record(0.0, "a", group, 3, sent=0.01, first=0.01 + ttft_s, last=last, num_output=num)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, q) for q in (0.2, 0.5, 0.95, 1.0)] == [1.0, 3.0, 5.0, 5.0]


def test_times_are_from_sending_and_a_token_is_without_the_first() -> None:
    one = record()
    assert (one.ttft_s, one.tpot_s, one.e2e_s) == pytest.approx((0.5, 0.05, 1.0))
    assert record(num=1).tpot_s is None
    assert record(error="503").e2e_s is None


def test_goodput_counts_what_was_answered_in_time() -> None:
    records = [record(), record(ttft_s=1.5), record(tpot_s=0.2), record(error="overloaded"), record(num=1)]
    group = summarise(records, SLO).groups["all"]
    assert group.good_share == 2 / 5
    assert group.errors == {"overloaded": 1}
    assert group.ttft_s["p99"] == pytest.approx(1.5)
    assert group.output_tokens_per_s == pytest.approx(34 / 2.51)


def test_groups_are_summed_up_apart_and_all_together() -> None:
    summary = summarise([record(group="warm"), record(group="cold", error="x")], SLO)
    assert {name: group.requests for name, group in summary.groups.items()} == {
        "all": 2,
        "warm": 1,
        "cold": 1,
    }
    assert summary.groups["warm"].errors == {}
    assert summary.groups["cold"].ttft_s == {}


def test_nothing_at_all_is_no_crash() -> None:
    assert summarise([], SLO).groups["all"].requests == 0


def test_lookups_are_told_by_tier_over_all_replicas() -> None:
    name = "lorafleet_adapter_lookups_total"
    page = "".join(
        f'{name}{{adapter="{adapter}",tier="{tier}",replica="{replica}"}} {count}\n'
        for adapter, tier, replica, count in
        (("a", "hbm", "1", 5), ("a", "hbm", "2", 2), ("b", "source", "1", 3))
    )  # fmt: skip
    assert lookups(f"# TYPE {name} counter\n{page}") == {"hbm": 7, "source": 3}
    assert lookups("# TYPE other gauge\nother 1\n") == {}


def test_a_replica_that_ended_takes_nothing_away() -> None:
    assert difference({"hbm": 5.0, "host": 9.0}, {"hbm": 8.0, "host": 2.0, "disk": 1.0}) == {
        "hbm": 3.0, "host": 0.0, "disk": 1.0,
    }  # fmt: skip


def test_limits_are_named_where_they_are_not_kept() -> None:
    summary = summarise([record(), record(error="x")], SLO, {"hbm": 3.0, "source": 1.0})
    assert summary.hit_ratio == 0.75
    assert missed(summary, Limits(0.5, 0.6, 0.5, 0.75)) == []
    texts = missed(summary, Limits(0.0, 0.4, 0.6, 0.8))
    assert [text.partition(":")[0] for text in texts] == ["errors", "TTFT p95", "good requests", "hit ratio"]


def test_a_run_without_an_answer_keeps_no_limit() -> None:
    assert len(missed(summarise([record(error="x")], SLO), Limits(0.0, 9.0, 0.1, 0.1))) == 4
