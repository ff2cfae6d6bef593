"""How a command that runs ranks ends: its exit code, and what it says if a rank failed or a signal came."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from meshwright.comm.launch import Interrupted, RankFailure

FAILED = 1


def exit_code(call: Callable[[], object]) -> int:
    """0 when `call` returns; otherwise the traceback of the first rank that failed, one line, and a code.

    The code after a signal is 128 + the signal, as a shell has it: 130 after Ctrl-C.
    """
    try:
        call()
    except RankFailure as failure:
        print(failure.text.rstrip(), file=sys.stderr)
        print(f"rank {failure.rank} failed; all ranks stopped", file=sys.stderr)
        return FAILED
    except Interrupted as stop:
        print(f"stopped by {stop}; all ranks stopped", file=sys.stderr)
        return 128 + stop.signum
    except KeyboardInterrupt:  # one rank runs in this process, or ranks were not running yet
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0
