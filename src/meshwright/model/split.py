"""Which layers of a model make which stage: the costs of the sheet, balanced.

Not the rule of balance itself (`costs.balance`), and not a choice of the number of stages (the planner's).
GPipe (Huang et al., 2019), section 2.2: the cut minimises the load of the heaviest stage.
"""

from __future__ import annotations

from meshwright.costs.balance import balance
from meshwright.costs.sheet import sheet
from meshwright.costs.spec import GPTSpec
from meshwright.model.gpt import ties
from meshwright.schedule.cut import Cut


def cut_layers(spec: GPTSpec, stages: int) -> Cut:
    """Cut the L + 2 layers into `stages` runs whose heaviest, by matmul FLOPs, is as light as can be; none is empty.

    Raises:
        ValueError: there are more stages than layers.
    """
    return Cut(balance([row.flops for row in sheet(spec)], stages), ties(spec))
