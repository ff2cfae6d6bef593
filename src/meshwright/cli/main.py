"""`meshwright`: the verbs, and what their errors look like.

A verb returns an exit code. A user's mistake (any ValueError) is a message and exit code 2, without a traceback. Verbs
are imported when they are asked for, so `--help` and `show` answer at once and never load torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App
from cyclopts.exceptions import CycloptsError

import meshwright

USAGE = 2
"""Exit code of a command that was not understood or cannot be carried out as given."""


def make_app() -> App:
    """The command line as cyclopts wants it described."""
    app = App(name="meshwright", help=meshwright.__doc__, version=meshwright.__version__, help_format="plaintext")
    app.command("meshwright.cli.train:app", name="train", help="Train the model that a TOML file describes.")
    app.command("meshwright.cli.sample:sample", name="sample", help="Continue a text with a trained model.")
    app.command(
        "meshwright.cli.show:show", name="show", help="Draw a layout: mesh, schedule, and the program of a rank."
    )
    app.command(
        "meshwright.cli.verify:verify", name="verify", help="Prove that a layout computes what one process computes."
    )
    app.command(
        "meshwright.cli.doctor:app", name="doctor", help="Examine what this machine does: communication (comm)."
    )
    return app


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line in `words` (without the program's name; None: this process's) and return its exit code."""
    given = list(sys.argv[1:] if words is None else words)
    try:
        code = make_app()(given, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at the end
        return 0
    return code if isinstance(code, int) else 0
