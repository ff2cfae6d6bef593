"""Programs print and read back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.op import Kind, Op
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Reduce,
    Release,
    Send,
    Step,
    Sync,
    Tied,
    parse_action,
)

numbers = st.integers(0, 200)
forwards = st.builds(Op, st.just(Kind.FORWARD), numbers, numbers)
backwards = st.builds(Op, st.just(Kind.BACKWARD), numbers, numbers)
units = numbers.map(str) | st.from_regex(r"[a-z]+", fullmatch=True)
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(Receive, forwards | backwards, numbers),
    st.builds(Send, forwards | backwards, numbers),
    st.builds(Forward, forwards, numbers),
    st.builds(Recompute, forwards, numbers),
    st.builds(Backward, backwards, numbers),
    st.builds(Gather, units),
    st.builds(Release, units),
    st.builds(Reduce, units),
    st.builds(Sync, units),
    st.builds(Tied, units),
    st.builds(Step),
)


@given(st.builds(Program, numbers, st.lists(actions, max_size=12).map(tuple)))
@settings(max_examples=60, deadline=None)
def test_any_program_reads_back_from_its_text(program: Program) -> None:
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize(
    "text", ["", "STEP 1", "GATHER", "RECV F0@0", "SEND F0@0 from 1", "X3@1.4", "F3@1", "GATHER 4 5"]
)
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an action|an op reads like"):
        parse_action(text)


def test_a_program_without_its_heading_is_refused() -> None:
    with pytest.raises(ValueError, match="does not begin a program"):
        Program.parse("STEP")


def test_the_picture_marks_one_action_among_its_neighbours() -> None:
    program = Program(2, tuple(Gather(str(unit)) for unit in range(12)))
    assert program.picture(at=6, around=1).splitlines() == [
        "program of rank 2",
        "     ... 5 before",
        "  5  GATHER 5",
        "> 6  GATHER 6",
        "  7  GATHER 7",
        "     ... 4 after",
    ]
    assert program.picture(at=12, around=1).splitlines()[-2:] == ["  11  GATHER 11", "> 12  (end)"]
    assert program.picture(at=0, around=20).count("\n") == 12
