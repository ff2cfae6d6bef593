"""What a layout will do, before it runs: what is wrong with it, and how long it takes.

Built on layout, schedule and costs; nothing here imports torch.
"""
