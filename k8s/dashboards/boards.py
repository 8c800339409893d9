"""What the four dashboards show. A hit is a lookup that did not have to read the source."""

from __future__ import annotations

from k8s.dashboards.panels import Board, Panel, Variable, panel

# Grafana replaces it by a few scrape intervals
RATE = "[$__rate_interval]"
ADAPTER = 'adapter=~"$adapter"'
REPLICA = 'replica=~"$replica"'


def rate(metric: str, selector: str = "", by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate(lorafleet_{metric}{{{selector}}}{RATE}))"


def ratio(metric: str, part: str, by: str, selector: str = "") -> str:
    """Share of the series that `part` selects; nothing where nothing happened."""
    chosen = f"{selector}, {part}" if selector else part
    return f"{rate(metric, chosen, by)} / ({rate(metric, selector, by)} > 0)"


def mean(total: str, count: str, selector: str = "", by: str = "") -> str:
    return f"{rate(total, selector, by)} / ({rate(count, selector, by)} > 0)"


def quantile(q: float, histogram: str, selector: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', selector, 'le')})"


def quantiles(title: str, histogram: str, unit: str = "s", selector: str = "") -> Panel:
    pairs = [(quantile(q, histogram, selector), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]
    return panel(title, "lines", *pairs, unit=unit)


HIT = 'tier!="source"'
LOOKUPS = "adapter_lookups_total"
ADAPTER_TTFT = "adapter_time_to_first_token_seconds"
LOAD = "lorafleet_requests_running + lorafleet_requests_waiting"

FLEET = Board(
    "fleet",
    "lorafleet / Fleet",
    (
        panel("Requests", "number", rate("requests_total"), unit="reqps"),
        panel("Hit ratio", "number", ratio(LOOKUPS, HIT, ""), unit="percentunit"),
        panel("First token, p95", "number", quantile(0.95, "time_to_first_token_seconds"), unit="s"),
        panel("Errors", "number", ratio("requests_total", 'finish_reason="error"', ""), unit="percentunit"),
        panel("Waiting", "number", "sum(lorafleet_requests_waiting)"),
        panel("Replicas", "number", "count(lorafleet_max_running_requests)"),
        panel(
            "Where adapters were found",
            "stack",
            (rate(LOOKUPS, by="tier"), "{{tier}}"),
            unit="reqps",
            about="hbm: at once. host: after one copy. disk: after a read. source: after a download.",
        ),
        quantiles("First token", "time_to_first_token_seconds"),
        quantiles("Time per output token", "time_per_output_token_seconds"),
        panel(
            "Requests by end",
            "stack",
            (rate("requests_total", by="finish_reason"), "{{finish_reason}}"),
            unit="reqps",
        ),
        panel(
            "Tokens",
            "lines",
            (rate("prompt_tokens_total"), "prompt"),
            (rate("cached_prompt_tokens_total"), "prompt, cached"),
            (rate("output_tokens_total"), "output"),
        ),
        panel("Pool pages", "stack", ("sum by (owner) (lorafleet_pool_pages)", "{{owner}}")),
        panel(
            "Evictions",
            "stack",
            (rate("evictions_total", by="tier, cause"), "{{tier}}: {{cause}}"),
            unit="ops",
        ),
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
            ("sum(lorafleet_max_running_requests)", "seats"),
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
        panel(
            "Hit ratio", "lines", (ratio(LOOKUPS, HIT, "adapter", ADAPTER), "{{adapter}}"), unit="percentunit"
        ),
        panel(
            "Hit ratio of device memory",
            "lines",
            (ratio(LOOKUPS, 'tier="hbm"', "adapter", ADAPTER), "{{adapter}}"),
            unit="percentunit",
        ),
        panel("Found where", "stack", (rate(LOOKUPS, ADAPTER, "tier"), "{{tier}}"), unit="reqps"),
        panel(
            "Requests by end",
            "stack",
            (rate("requests_total", ADAPTER, "finish_reason"), "{{finish_reason}}"),
            unit="reqps",
        ),
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
            (f"sum by (tier) (lorafleet_adapter_resident_bytes{{{ADAPTER}}})", "{{tier}}"),
            unit="bytes",
        ),
        panel(
            "In flight",
            "lines",
            (f"sum by (adapter) (lorafleet_adapter_requests_running{{{ADAPTER}}})", "{{adapter}} running"),
            (f"sum by (adapter) (lorafleet_adapter_requests_waiting{{{ADAPTER}}})", "{{adapter}} waiting"),
        ),
        panel(
            "Tokens",
            "lines",
            (rate("prompt_tokens_total", ADAPTER), "prompt"),
            (rate("cached_prompt_tokens_total", ADAPTER), "prompt, cached"),
            (rate("output_tokens_total", ADAPTER), "output"),
        ),
        panel("Pages", "lines", (f"sum by (replica) (lorafleet_adapter_pages{{{ADAPTER}}})", "{{replica}}")),
    ),
    (Variable("adapter", "lorafleet_adapter_lookups_total"),),
)

REPLICAS = Board(
    "replica",
    "lorafleet / Replica",
    (
        panel("Pool pages", "stack", (f"sum by (owner) (lorafleet_pool_pages{{{REPLICA}}})", "{{owner}}")),
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
        panel(
            "Adapter slots",
            "lines",
            (f"sum by (replica) (lorafleet_adapter_slots_used{{{REPLICA}}})", "{{replica}} used"),
            (f"sum by (replica) (lorafleet_adapter_slots{{{REPLICA}}})", "{{replica}} all"),
        ),
        panel("Running", "lines", (f"lorafleet_requests_running{{{REPLICA}}}", "{{replica}}")),
        panel("Waiting", "lines", (f"lorafleet_requests_waiting{{{REPLICA}}}", "{{replica}}")),
        panel(
            "Tokens held and queued",
            "lines",
            (f"lorafleet_running_tokens{{{REPLICA}}}", "{{replica}} held"),
            (f"lorafleet_queued_tokens{{{REPLICA}}}", "{{replica}} queued"),
        ),
        quantiles("Step", "step_duration_seconds", selector=REPLICA),
        panel("Steps", "lines", (rate("steps_total", REPLICA, "replica"), "{{replica}}"), unit="ops"),
        quantiles("Adapters in a step", "step_adapters", unit="short", selector=REPLICA),
        panel(
            "Ranks in the batch",
            "lines",
            (f"lorafleet_running_ranks{{{REPLICA}}}", "{{replica}}"),
            about="Summed over its requests. What the adapters cost grows with it.",
        ),
        panel(
            "Preemptions", "lines", (rate("preemptions_total", REPLICA, "replica"), "{{replica}}"), unit="ops"
        ),
        panel(
            "Evictions",
            "stack",
            (rate("evictions_total", REPLICA, "tier, cause"), "{{tier}}: {{cause}}"),
            unit="ops",
        ),
        quantiles("Loads", "adapter_load_duration_seconds", selector=REPLICA),
        panel(
            "Host memory for adapters",
            "lines",
            (f"lorafleet_host_cache_bytes{{{REPLICA}}}", "{{replica}} used"),
            (f"lorafleet_host_cache_capacity_bytes{{{REPLICA}}}", "{{replica}} all"),
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
            (f"max({LOAD}) / (avg({LOAD}) > 0)", "most loaded / mean"),
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
