"""What replays show: figures of one, means over seeds, a table, a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from load_tests.replay.policies import HINT_S
from load_tests.replay.replica import Replica
from load_tests.replay.workloads import Workload

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    policy: str
    num_requests: int
    hit_hbm: float  # share of requests whose adapter was there when they arrived
    hit_host: float
    hit_source: float
    evicted: dict[str, int]  # adapters from the pool, by cause
    evicted_from_host: int
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tokens_per_s: float  # output, while requests arrive
    preemptions: int


def summarise(workload: Workload, policy: str, replica: Replica) -> Result:
    begin = workload.begin_s
    ttft = [
        replica.first_token[request_id] - arrived
        for request_id, arrived in replica.arrived.items()
        if arrived >= begin
    ]
    cuts = quantiles(ttft, n=100)
    core, hits = replica.core, replica.hits
    return Result(
        workload=workload.name,
        policy=policy,
        num_requests=len(replica.arrived),
        hit_hbm=hits["hbm"] / len(ttft),
        hit_host=hits["host"] / len(ttft),
        hit_source=hits["source"] / len(ttft),
        evicted=dict(core.stats.hbm_evictions),
        evicted_from_host=core.manager.num_evicted,
        ttft_p50_s=cuts[49],
        ttft_p99_s=cuts[98],
        ttft_mean_s=mean(ttft),
        tokens_per_s=replica.num_tokens_in_window / (workload.duration_s - begin),
        preemptions=core.stats.preemptions,
    )


def average(results: Iterable[Result]) -> Result:
    """Of replays of one workload by one policy with different seeds; counts are added."""
    rows = list(results)
    evicted = sum((Counter(row.evicted) for row in rows), Counter[str]())
    names = ("hit_hbm", "hit_host", "hit_source", "ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "tokens_per_s")
    return Result(
        workload=rows[0].workload,
        policy=rows[0].policy,
        num_requests=sum(row.num_requests for row in rows),
        evicted=dict(evicted),
        evicted_from_host=sum(row.evicted_from_host for row in rows),
        preemptions=sum(row.preemptions for row in rows),
        **{name: mean(getattr(row, name) for row in rows) for name in names},
    )


def to_json(results: list[Result], command: str, conditions: dict[str, Any]) -> dict[str, Any]:
    return {"command": command, "conditions": conditions, "rows": [asdict(result) for result in results]}


def to_markdown(results: list[Result], command: str, conditions: dict[str, Any]) -> str:
    lines = [
        "# Who yields pages: replayed traces",
        "",
        f"Written by `{command}`, which says what is simulated; no GPU.",
        f"A step takes {conditions['step']} (ms).",
        f"Pool of {conditions['pool_pages']} pages of 2 MiB, {conditions['max_num_seqs']} requests at once,"
        f" {conditions['seeds']} seeds.",
        "",
        "Hits: where a request's adapter was when it arrived. Time to first token (TTFT) in ms. `behind`: by",
        "how much ours is worse than the best of the others, in throughput, in TTFT p50, in TTFT p99.",
        "",
        "`no prefetch`: adapters go to the pool when a request asks for them, as with the others. `hints`:",
        f"ours, told of each request {HINT_S * 1e3:.0f} ms before it arrives. `unused`: copied in vain.",
        "",
        "![hits and throughput](replay.svg)",
        "",
        "| workload | policy | HBM | host | source | evicted | TTFT p50 | p99 | tok/s | preempted | behind |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row, results) for row in results]
    return "\n".join(lines) + "\n"


def plot(results: list[Result], path: Path) -> None:
    # only this needs matplotlib
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "replay"  # the same file for the same figures
    from matplotlib import pyplot as plt

    workloads = list(dict.fromkeys(row.workload for row in results))
    policies = list(dict.fromkeys(row.policy for row in results))
    figure, axes = plt.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    width = 0.85 / len(policies)
    for i, policy in enumerate(policies):
        rows = {row.workload: row for row in results if row.policy == policy}
        best = {w: max(r.tokens_per_s for r in results if r.workload == w) for w in workloads}
        offsets = [n + (i - (len(policies) - 1) / 2) * width for n in range(len(workloads))]
        color = "black" if policy == OURS else f"C{i}"
        axes[0].bar(offsets, [rows[w].hit_hbm * 100 for w in workloads], width, label=policy, color=color)
        shares = [rows[w].tokens_per_s / best[w] * 100 for w in workloads]
        axes[1].bar(offsets, shares, width, color=color)
    axes[0].set_ylabel("adapter in HBM at arrival, %")
    axes[1].set_ylabel("output tokens/s, % of the best")
    axes[1].set_xticks(range(len(workloads)), workloads, rotation=30, ha="right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", linewidth=0.4)
        axis.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=len(policies), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def behind(ours: Result, results: list[Result]) -> tuple[float, float, float]:
    """By which shares the best of the others is better, in throughput, TTFT p50 and TTFT p99."""
    others = [
        row for row in results if row.workload == ours.workload and not row.policy.startswith(ours.policy)
    ]
    return (
        1.0 - ours.tokens_per_s / max(row.tokens_per_s for row in others),
        1.0 - min(row.ttft_p50_s for row in others) / ours.ttft_p50_s,
        1.0 - min(row.ttft_p99_s for row in others) / ours.ttft_p99_s,
    )


def _line(row: Result, results: list[Result]) -> str:
    shares = (row.hit_hbm, row.hit_host, row.hit_source)
    evicted = ", ".join(f"{count} {cause}" for cause, count in sorted(row.evicted.items()))
    if row.evicted_from_host:
        evicted += f"{', ' if evicted else ''}{row.evicted_from_host} from host"
    lags = behind(row, results) if row.policy == OURS else ()
    cells = [
        row.workload,
        f"**{row.policy}**" if row.policy == OURS else row.policy,
        *(f"{share:.1%}" for share in shares),
        evicted,
        f"{row.ttft_p50_s * 1e3:.1f}",
        f"{row.ttft_p99_s * 1e3:.1f}",
        f"{row.tokens_per_s:.0f}",
        str(row.preemptions),
        " ".join(f"{max(0.0, lag):.1%}" for lag in lags),
    ]
    return f"| {' | '.join(cells)} |"
