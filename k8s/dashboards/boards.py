"""What the four dashboards show. A hit is a lookup that did not have to read the source."""

from __future__ import annotations

from k8s.dashboards.panels import Board, Panel, Variable, panel

# Grafana replaces it by a few scrape intervals
RATE = "[$__rate_interval]"
ADAPTER = 'adapter=~"$adapter"'
REPLICA = 'replica=~"$replica"'
HIT = 'tier!="source"'
LOOKUPS = "adapter_lookups_total"
ADAPTER_TTFT = "adapter_time_to_first_token_seconds"
# an ingress is not scraped each time
AT_INGRESS = "sum(last_over_time(lorafleet_ingress_requests_waiting[1m]))"
LOAD = "lorafleet_requests_running + lorafleet_requests_waiting"


def rate(metric: str, selector: str = "", by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate(lorafleet_{metric}{{{selector}}}{RATE}))"


def quotient(above: str, below: str) -> str:
    """Nothing where nothing happened."""
    return f"{above} / ({below} > 0)"


def ratio(metric: str, part: str, by: str, selector: str = "") -> str:
    """Share of the series that `part` selects."""
    chosen = f"{selector}, {part}" if selector else part
    return quotient(rate(metric, chosen, by), rate(metric, selector, by))


def mean(total: str, count: str, selector: str = "", by: str = "") -> str:
    return quotient(rate(total, selector, by), rate(count, selector, by))


def quantile(q: float, histogram: str, selector: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', selector, 'le')})"


def quantiles(title: str, histogram: str, unit: str = "s", selector: str = "") -> Panel:
    pairs = [(quantile(q, histogram, selector), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]
    return panel(title, "lines", *pairs, unit=unit)


def gauge(metric: str, selector: str = "", by: str = "") -> str:
    series = f"lorafleet_{metric}{{{selector}}}"
    return f"sum by ({by}) ({series})" if by else series


def adapter_ratio(title: str, part: str) -> Panel:
    expression = ratio(LOOKUPS, part, "adapter", ADAPTER)
    return panel(title, "lines", (expression, "{{adapter}}"), unit="percentunit")


def replica_gauges(title: str, *series: tuple[str, str], unit: str = "short", about: str = "") -> Panel:
    """`series`: metric, and what to call it; nothing where there is only one."""
    pairs = [(gauge(metric, REPLICA), f"{{{{replica}}}} {word}".strip()) for metric, word in series]
    return panel(title, "lines", *pairs, unit=unit, about=about)


def replica_rate(title: str, metric: str) -> Panel:
    return panel(title, "lines", (rate(metric, REPLICA, "replica"), "{{replica}}"), unit="ops")


# what several boards show, each of its own choice of adapters or replicas


def tokens(selector: str = "") -> Panel:
    kinds = (
        ("prompt_tokens_total", "prompt"),
        ("cached_prompt_tokens_total", "prompt, cached"),
        ("output_tokens_total", "output"),
    )
    return panel("Tokens", "lines", *((rate(metric, selector), word) for metric, word in kinds))


def requests_by_end(selector: str = "") -> Panel:
    expression = rate("requests_total", selector, "finish_reason")
    return panel("Requests by end", "stack", (expression, "{{finish_reason}}"), unit="reqps")


def found_where(title: str, selector: str = "", about: str = "") -> Panel:
    return panel(title, "stack", (rate(LOOKUPS, selector, "tier"), "{{tier}}"), unit="reqps", about=about)


def evictions(selector: str = "") -> Panel:
    return panel(
        "Evictions",
        "stack",
        (rate("evictions_total", selector, "tier, cause"), "{{tier}}: {{cause}}"),
        (rate("evictions_blocked_total", selector, "cause"), "blocked: {{cause}}"),
        unit="ops",
        about="Blocked: a request waits, since all that could have been evicted for it is in use.",
    )


def pool_pages(selector: str = "") -> Panel:
    return panel("Pool pages", "stack", (gauge("pool_pages", selector, "owner"), "{{owner}}"))


FLEET = Board(
    "fleet",
    "lorafleet / Fleet",
    (
        panel("Requests", "number", rate("requests_total"), unit="reqps"),
        panel("Hit ratio", "number", ratio(LOOKUPS, HIT, ""), unit="percentunit"),
        panel("First token, p95", "number", quantile(0.95, "time_to_first_token_seconds"), unit="s"),
        panel("Errors", "number", ratio("requests_total", 'finish_reason="error"', ""), unit="percentunit"),
        panel("Waiting", "number", "sum(lorafleet_requests_waiting)"),
        panel("Replicas", "number", "count(lorafleet_max_running_requests) or vector(0)"),
        found_where(
            "Where adapters were found",
            about="hbm: at once. host: after one copy. disk: after a read. source: after a download.",
        ),
        quantiles("First token", "time_to_first_token_seconds"),
        quantiles("Time per output token", "time_per_output_token_seconds"),
        requests_by_end(),
        panel(
            "Requests at the ingress, by outcome",
            "stack",
            (rate("ingress_requests_total", by="outcome"), "{{outcome}}"),
            unit="reqps",
            about="Those that no replica took are overloaded or unavailable, and in no other panel.",
        ),
        tokens(),
        pool_pages(),
        evictions(),
        panel(
            "Loads that failed",
            "lines",
            (rate("adapter_load_failures_total", by="adapter"), "{{adapter}}"),
            unit="ops",
        ),
        panel(
            "Seats",
            "lines",
            ("sum(lorafleet_requests_running)", "running"),
            ("sum(lorafleet_requests_waiting)", "waiting"),
            (AT_INGRESS, "without a first token, at the ingress"),
            ("sum(lorafleet_max_running_requests)", "seats"),
        ),
        panel(
            "Adapters in the catalog",
            "stack",
            (
                "max by (state, kept) (lorafleet_catalog_adapters"
                " * on (instance) group_left (kept) lorafleet_catalog_kept)",
                "{{state}}, in {{kept}}",
            ),
            about="By state, and where run-time loads are kept.",
        ),
        panel("Hottest adapters", "table", f"topk(20, {rate('requests_total', by='adapter')})", unit="reqps"),
        panel(
            "Lowest hit ratios", "table", f"bottomk(20, {ratio(LOOKUPS, HIT, 'adapter')})", unit="percentunit"
        ),
    ),
)

ADAPTERS = Board(
    "adapter",
    "lorafleet / Adapter",
    (
        adapter_ratio("Hit ratio", HIT),
        adapter_ratio("Hit ratio of device memory", 'tier="hbm"'),
        found_where("Found where", ADAPTER),
        requests_by_end(ADAPTER),
        panel(
            "Errors",
            "lines",
            (rate("request_errors_total", ADAPTER, "adapter, code"), "{{adapter}}: {{code}}"),
            unit="reqps",
        ),
        panel(
            "First token, mean",
            "lines",
            (
                mean(f"{ADAPTER_TTFT}_sum", f"{ADAPTER_TTFT}_count", ADAPTER, "adapter"),
                "{{adapter}}",
            ),
            unit="s",
        ),
        panel(
            "Waited for its weights, a request",
            "lines",
            (mean("adapter_blocked_seconds_total", LOOKUPS, ADAPTER, "adapter"), "{{adapter}}"),
            unit="s",
        ),
        panel(
            "Load, mean",
            "lines",
            (mean("adapter_load_seconds_total", "adapter_loads_total", ADAPTER, "tier"), "from {{tier}}"),
            unit="s",
        ),
        panel(
            "Loads",
            "lines",
            (rate("adapter_loads_total", ADAPTER, "adapter, tier"), "{{adapter}} from {{tier}}"),
            (rate("adapter_load_failures_total", ADAPTER, "adapter"), "{{adapter}} failed"),
            unit="ops",
        ),
        panel(
            "Evictions", "stack", (rate("adapter_evictions_total", ADAPTER, "cause"), "{{cause}}"), unit="ops"
        ),
        panel(
            "Replicas that hold it",
            "lines",
            (f"count by (adapter, tier) (lorafleet_adapter_loaded{{{ADAPTER}}})", "{{adapter}} in {{tier}}"),
        ),
        panel(
            "Memory",
            "stack",
            (gauge("adapter_resident_bytes", ADAPTER, "tier"), "{{tier}}"),
            unit="bytes",
        ),
        panel(
            "In flight",
            "lines",
            (gauge("adapter_requests_running", ADAPTER, "adapter"), "{{adapter}} running"),
            (gauge("adapter_requests_waiting", ADAPTER, "adapter"), "{{adapter}} waiting"),
        ),
        tokens(ADAPTER),
        panel("Pages", "lines", (gauge("adapter_pages", ADAPTER, "replica"), "{{replica}}")),
    ),
    (Variable("adapter", "lorafleet_adapter_lookups_total"),),
)

REPLICAS = Board(
    "replica",
    "lorafleet / Replica",
    (
        pool_pages(REPLICA),
        panel(
            "Pool",
            "stack",
            (
                f"sum by (owner) (lorafleet_pool_pages{{{REPLICA}}}"
                " * on (replica) group_left () lorafleet_pool_page_bytes)",
                "{{owner}}",
            ),
            unit="bytes",
        ),
        replica_gauges("Adapter slots", ("adapter_slots_used", "used"), ("adapter_slots", "all")),
        replica_gauges("Running", ("requests_running", "")),
        replica_gauges("Waiting", ("requests_waiting", "")),
        replica_gauges("Tokens held and queued", ("running_tokens", "held"), ("queued_tokens", "queued")),
        quantiles("Step", "step_duration_seconds", selector=REPLICA),
        replica_rate("Steps", "steps_total"),
        quantiles("Adapters in a step", "step_adapters", unit="short", selector=REPLICA),
        replica_gauges(
            "Ranks in the batch",
            ("running_ranks", ""),
            about="Summed over its requests. What the adapters cost grows with it.",
        ),
        replica_rate("Preemptions", "preemptions_total"),
        evictions(REPLICA),
        panel(
            "Prefetches",
            "lines",
            (rate("prefetches_total", REPLICA, "reason"), "{{reason}}"),
            (rate("prefetches_used_total", REPLICA, "reason"), "{{reason}}, used"),
            about="Adapters copied to the pool before a request asked for them.",
        ),
        quantiles("Loads", "adapter_load_duration_seconds", selector=REPLICA),
        replica_gauges(
            "Host memory for adapters",
            ("host_cache_bytes", "used"),
            ("host_cache_capacity_bytes", "all"),
            unit="bytes",
        ),
        quantiles("Requests, whole", "request_duration_seconds", selector=REPLICA),
    ),
    (Variable("replica", "lorafleet_max_running_requests"),),
)

ROUTER = Board(
    "router",
    "lorafleet / Router",
    (
        panel(
            "Choices by reason",
            "stack",
            (rate("router_requests_total", by="reason"), "{{reason}}"),
            unit="reqps",
            about="Why the router chose the replica: docs/metrics.md tells the reasons.",
        ),
        panel(
            "Sent where the adapter was not",
            "lines",
            (ratio(LOOKUPS, 'tier=~"disk|source"', ""), "in neither memory"),
            (mean("router_stale_misroutes_total", "router_requests_total"), "resident no more"),
            unit="percentunit",
        ),
        panel(
            "Requests by replica",
            "stack",
            (rate("router_requests_total", by="replica"), "{{replica}}"),
            unit="reqps",
        ),
        panel(
            "Imbalance",
            "lines",
            (quotient(f"max({LOAD})", f"avg({LOAD})"), "most loaded / mean"),
        ),
        panel(
            "Replicas an adapter is on",
            "table",
            'topk(20, count by (adapter) (lorafleet_adapter_loaded{tier="hbm"}))',
        ),
        panel(
            "Adapters on one replica, and on several",
            "stack",
            ('count(count by (adapter) (lorafleet_adapter_loaded{tier="hbm"}) == 1) or vector(0)', "one"),
            ('count(count by (adapter) (lorafleet_adapter_loaded{tier="hbm"}) > 1) or vector(0)', "several"),
        ),
    ),
)

BOARDS = (FLEET, ADAPTERS, REPLICAS, ROUTER)
