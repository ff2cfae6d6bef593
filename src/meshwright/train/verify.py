"""`meshwright verify`: proves on local CPU ranks that a layout computes what one process computes."""

from __future__ import annotations

from dataclasses import fields

import torch

from meshwright.comm.connect import connect
from meshwright.comm.launch import launch
from meshwright.comm.start import Start
from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.planner.rules import problems
from meshwright.train.parity import Case, Deviations, deviations

TOLERANCE = 1e-10


def small_case(layout: Layout, steps: int) -> Case:
    """A model just large enough for `layout` to cut: as many blocks and heads as it asks for, odd sizes elsewhere."""
    heads = layout.tensor if layout.tensor > 2 else 4
    spec = GPTSpec(
        layers=max(2, layout.pipeline), hidden=4 * heads, heads=heads, sequence=5, vocabulary=13, tied=True, dropout=0.2
    )
    return Case(spec, batch=2 * layout.data * layout.micro_batches - 1, steps=steps)


def verify(text: str, steps: int = 3) -> None:
    """Train a small model over the layout `text` on local CPU ranks and print how far it is from one process.

    Raises:
        ValueError: the layout cannot be, with every reason.
        VerificationError: it computes something else than one process.
    """
    layout = Layout.parse(text)
    case = small_case(layout, steps)
    found = problems(layout, case.spec, case.batch)
    if found:
        raise ValueError("\n".join(f"{problem.what}; {problem.remedy}" for problem in found))
    launch(_verify_rank, (case, layout), layout.ranks)


class VerificationError(Exception):
    """A layout computed other numbers than one process."""


def _verify_rank(start: Start, argument: tuple[Case, Layout]) -> None:
    case, layout = argument
    groups = connect(layout.mesh, start, torch.device("cpu"))
    result = deviations(groups, case, layout)
    if groups.rank == 0:
        print(report(case, layout, result), flush=True)
    if not result.largest <= TOLERANCE:
        raise VerificationError(f"{layout} deviates by {result.largest:.1e}; {TOLERANCE:.0e} is allowed")


def report(case: Case, layout: Layout, result: Deviations) -> str:
    """The comparison as a table."""
    rows = [f"  {field.name:<10}{getattr(result, field.name):9.1e}" for field in fields(result)]
    spec = case.spec
    return "\n".join(
        [
            f"{layout}: {case.steps} steps of AdamW on {layout.ranks} ranks against one process, in float64",
            f"GPT of {spec.layers} layers, {spec.hidden} hidden, {spec.heads} heads, tied, dropout {spec.dropout}; "
            f"{case.batch} samples a step",
            "largest relative difference",
            *rows,
            f"{'the same' if result.largest <= TOLERANCE else 'NOT the same'} (up to {TOLERANCE:.0e})",
        ]
    )
