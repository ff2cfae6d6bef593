"""Timelines: makespan, busy time, bubble and the forms they are written in."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.timeline import Span, Timeline

times = st.integers(-100, 100) | st.fractions(min_value=0, max_value=9, max_denominator=7) | st.floats(0, 1e6)
labels = st.from_regex(r"[A-Z]+( [a-z0-9@.]+)*", fullmatch=True)
timelines = st.lists(st.builds(Span, st.integers(0, 9), labels, times, times), max_size=5).map(
    lambda spans: Timeline(tuple(spans))
)

TWO_RANKS = Timeline((Span(0, "F0@0", 1, 2), Span(1, "F0@1", 2, 3), Span(0, "B0@0", 5, 7), Span(1, "B0@1", 3, 5)))


@given(timelines)
@settings(max_examples=40, deadline=None)
def test_any_timeline_reads_back_from_its_text(timeline: Timeline) -> None:
    assert Timeline.parse(str(timeline)) == timeline


def test_time_counts_from_the_first_start_to_the_last_end() -> None:
    assert TWO_RANKS.makespan == 6
    assert TWO_RANKS.ranks == (0, 1)
    assert [TWO_RANKS.busy(rank) for rank in (0, 1)] == [3, 3]


def test_the_bubble_of_whole_and_fractional_times_is_exact() -> None:
    assert TWO_RANKS.bubble == Fraction(1, 2)
    thirds = Timeline((Span(0, "F", Fraction(0), Fraction(1, 3)), Span(1, "F", Fraction(1, 3), Fraction(1))))
    assert thirds.bubble == Fraction(1, 2)


def test_the_bubble_of_measured_times_is_a_float() -> None:
    measured = Timeline((Span(0, "F", 0.0, 0.25), Span(1, "F", 0.25, 1.0)))
    assert isinstance(measured.bubble, float)
    assert measured.bubble == pytest.approx(0.5)


def test_spans_that_overlap_count_once() -> None:
    overlapping = Timeline((Span(0, "F", 0, 4), Span(0, "SEND", 1, 2), Span(0, "B", 3, 5), Span(0, "STEP", 7, 8)))
    assert overlapping.busy(0) == 6


def test_an_empty_timeline_is_no_time() -> None:
    assert (Timeline(()).makespan, Timeline(()).bubble, Timeline(()).ranks) == (0, 0, ())


def test_a_chrome_trace_has_a_row_per_rank_and_microseconds() -> None:
    events = json.loads(TWO_RANKS.to_chrome_trace())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    first = next(event for event in events if event["ph"] == "X")
    assert (first["name"], first["tid"], first["ts"], first["dur"]) == ("F0@0", 0, 0.0, 1e6)


def test_text_that_is_no_span_is_named() -> None:
    with pytest.raises(ValueError, match='"0 3 5" is not a span'):
        Timeline.parse("0 3 5")
