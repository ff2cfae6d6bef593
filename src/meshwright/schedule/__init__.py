"""What each pipeline rank does, in which order: schedules, and the programs they are lowered to.

Order, not time, and no tensors: nothing here imports torch.
"""
