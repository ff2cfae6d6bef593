"""How quick meshwright is beside what a user would otherwise pick, and how much memory it takes.

    python benchmarks/peers.py [--size 17m 98m] [--dtype fp32 bf16] [--systems NAME ...] [--rounds 9] [--steps 2]
                               [--quiet 0.1] [--json]

The same GPT, from the same values, on the same batches of 8 x 256 tokens: trained by torch DDP, DDP +
ZeroRedundancyOptimizer, FSDP2, DeepSpeed (if it is installed) and by meshwright on two processes with one thread each,
and by one process with two threads, which is the limit. For each stage of ZeRO there is a match between ours, its
rivals and the limit. All systems of a match are started once; then they take turns, round after round.

    tokens/s   of the median round, and of the slowest and the quickest
    ÷ rival    speed beside the quickest rival of the match; peak beside the rival that takes least
    ÷ limit    speed beside the limit; in bf16 there are two, and the quicker counts
    peak       of all ranks together, shared pages counted once, beyond what was there after the imports
    loss       after the same number of steps everywhere, so one can see that all do the same

Ratios of speed are medians of the ratios within a round, so what else the machine does changes them little; a round in
which others used more than `--quiet` processors is played again, up to three times as many in all.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict

from contest.catalogue import SYSTEMS, matches
from contest.results import Row, rows
from contest.rounds import Plan, contest, say
from contest.table import text
from contest.work import DTYPES, SIZES, Work


def main() -> None:
    """Play the matches that were asked for; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument(
        "--quiet", type=float, default=0.1, help="processors that others may use in a round that counts"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit ends the processes and removes what they wrote
    plan = Plan(given.rounds, given.steps, given.quiet)
    works = [Work(size, dtype) for size in given.size for dtype in given.dtype]
    played: list[Row] = []
    for match in (match for work in works for match in matches(work, tuple(given.systems))):
        figures = rows(contest(match, plan))
        say("")
        played += figures
        if not given.json:
            print(text(figures), end="\n\n", flush=True)
    if given.json:
        print(json.dumps([asdict(row) for row in played], indent=1))


if __name__ == "__main__":
    main()
