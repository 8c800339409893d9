"""What one request took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.request_times import RequestTimes, placed
from engine.request import FinishReason, Milestones, OutputDelta


def delta(num_output_tokens: int, finish_reason: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(
        index=0,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason=finish_reason,
        stop_reason=None,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=num_output_tokens,
    )


def test_time_a_token_leaves_out_the_first_one() -> None:
    times = RequestTimes(arrived=10.0)
    times.saw([delta(1)], 12.0)
    times.saw([delta(2), delta(3)], 12.3)
    times.saw([delta(5, "stop")], 12.8)
    assert (times.first, times.last, times.finish_reason) == (12.0, 12.8, "stop")
    assert times.seconds_per_token == pytest.approx(0.8 / 4)


def test_one_token_has_no_time_a_token() -> None:
    times = RequestTimes(arrived=10.0)
    assert times.seconds_per_token is None
    times.saw([delta(1, "length")], 12.0)
    assert times.seconds_per_token is None


def test_a_request_has_ended_when_its_last_choice_has() -> None:
    """Who leaves before that has aborted it, and its duration is nobody's."""
    times = RequestTimes(arrived=10.0, unfinished=3)
    times.saw([delta(1, "stop"), delta(1)], 11.0)
    times.saw([delta(2, "stop")], 12.0)
    assert times.finish_reason is None
    times.saw([delta(3, "length")], 13.0)
    assert times.finish_reason == "length"


def test_milestones_leave_the_replica_on_everybodys_clock_and_say_where_they_were() -> None:
    first = replace(delta(1), milestones=Milestones(1.0, 2.0, 3.0, 4.0, "source"))
    told, untouched = placed([first, delta(2)], "r1", "home", epoch=1000.0)
    assert told.milestones == Milestones(1001.0, 1002.0, 1003.0, 1004.0, "source", "r1", "home")
    assert untouched == delta(2)
