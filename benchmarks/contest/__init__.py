"""The contest of `peers.py`: training systems that do the same work on the same processors, taking turns.

work.py      what everybody computes: the model's size, the batch, the dtype
model.py     the rivals' GPT, in plain torch
rivals.py    one function per rival        ours.py   the same for meshwright        catalogue.py   all by name
rank.py      the process of one rank       team.py   the processes of one system, seen from outside
memory.py    what processes take           rounds.py turns, alternating             results.py, table.py   figures
"""
