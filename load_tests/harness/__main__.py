"""Loads a server and reports. Any OpenAI-compatible one; `/metrics` gives hit ratios if it is a lorafleet.

    python -m load_tests.harness --url http://127.0.0.1:8000 --preset zipf-1.0 --rate 2 --duration 300 \\
        --out results/tonight --max-ttft-p95 2

Adapters are those that `/v1/models` names, but for the base model, or `--adapters`. Prompts are token ids,
so their lengths are exact; outputs have their planned length too, unless `--respect-eos`. Exits with 1 if a
limit is not kept.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

from load_tests.conditions import machine
from load_tests.harness import report
from load_tests.harness.client import Target
from load_tests.harness.measure import adapters_of, measure, show
from load_tests.harness.summary import Limits, Slo, missed
from load_tests.harness.workload import PRESETS, arrivals, plan, trace


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.harness",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--api-key", default=os.environ.get("LORAFLEET_API_KEY"))
    add("--adapters", nargs="*", help="their names; the first one is the most popular")
    add("--preset", choices=sorted(PRESETS), default="zipf-1.0")
    add("--rate", type=float, default=1.0, help="requests a second")
    add("--duration", type=float, default=60.0, help="seconds")
    add("--cv", type=float, help="of the gaps between requests; 1: Poisson, more: bursts")
    add("--trace", type=Path, help="a JSON list of seconds at which requests arrive, instead of a rate")
    add("--length-scale", type=float, default=1.0, help="of prompts and outputs")
    add("--seed", type=int, default=0)
    add("--respect-eos", action="store_true", help="for servers that do not know ignore_eos")
    add("--slo-ttft", type=float, default=Slo().ttft_s)
    add("--slo-tpot", type=float, default=Slo().tpot_s)
    add("--max-error-share", type=float, default=0.0)
    add("--max-ttft-p95", type=float)
    add("--min-good-share", type=float)
    add("--min-hit-ratio", type=float)
    add("--out", type=Path, help="a folder for summary.json, pictures and report.html")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    target = Target(
        options.url.rstrip("/"),
        (),
        options.api_key,
        extra={} if options.respect_eos else {"ignore_eos": True},
    )
    try:
        names = tuple(options.adapters or adapters_of(target))
    except OSError as error:
        parser.error(f"{target.url} does not answer: {error}")
    if not names:
        parser.error("the server names no adapters: give --adapters")
    target = Target(target.url, names, target.api_key, extra=target.extra)
    preset, rng = PRESETS[options.preset], random.Random(options.seed)
    try:
        times = (
            trace(options.trace, options.duration)
            if options.trace
            else arrivals(options.rate, options.duration, options.cv or preset.cv, rng)
        )
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    planned = plan(preset, times, len(names), rng, options.length_scale)
    slo = Slo(options.slo_ttft, options.slo_tpot)
    summary, records = measure(target, planned, slo, options.preset)
    limits = Limits(
        options.max_error_share, options.max_ttft_p95, options.min_good_share, options.min_hit_ratio
    )
    not_kept = missed(summary, limits)
    show(summary)
    if options.out:
        asked = ("preset", "rate", "duration", "cv", "length_scale", "seed", "slo_ttft", "slo_tpot")
        conditions = {**{name: getattr(options, name) for name in asked}, "adapters": len(names), **machine()}
        report.write(options.out, f"Load test: {options.preset}", conditions, summary, records, not_kept)
    for text in not_kept:
        print("missed:", text)
    return int(bool(not_kept))


if __name__ == "__main__":
    sys.exit(main())
