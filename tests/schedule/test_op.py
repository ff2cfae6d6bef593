"""Ops and what they need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.op import Kind, Op, needs

numbers = st.integers(0, 9999)


@given(st.builds(Op, st.sampled_from(Kind), numbers, numbers))
@settings(max_examples=40, deadline=None)
def test_an_op_reads_back_from_its_text(op: Op) -> None:
    assert Op.parse(str(op)) == op


def test_a_forward_needs_the_stage_before_and_a_backward_its_forward_and_the_stage_after() -> None:
    def needed(text: str) -> list[str]:
        return [str(op) for op in needs(Op.parse(text), 3)]

    assert needed("F5@0") == []
    assert needed("F5@1") == ["F5@0"]
    assert needed("B5@2") == ["F5@2"]
    assert needed("B5@0") == ["F5@0", "B5@1"]


@pytest.mark.parametrize("text", ["", "F3", "R3@1", "F3@1.4", "F-1@0", "f3@1"])
def test_other_text_is_no_op(text: str) -> None:
    with pytest.raises(ValueError, match="an op reads like F3@1"):
        Op.parse(text)
