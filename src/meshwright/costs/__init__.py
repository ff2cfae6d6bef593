"""What a model costs: its description, the cost sheet, the balanced cut, the traffic formulas.

Numbers only; nothing here imports torch.
"""
