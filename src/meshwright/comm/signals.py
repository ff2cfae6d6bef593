"""The signals that end a program, and how they are held back or handed on while ranks are started.

Not what is done about them: that is `launch`'s to say. All of this is for the main thread; elsewhere Python has no
handlers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What a terminal or an operator sends to end a program."""


@contextmanager
def held() -> Iterator[None]:
    """Hold back the signals that end a program; what came meanwhile is delivered at the end.

    For the moments in which an exception out of nowhere would leave something behind, or would be lost, as it may be
    within an import. A process that is started meanwhile starts with the signals held back.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Put back at the end the handlers that somebody replaces meanwhile, as torch's agent does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def end_at_once() -> None:
    """Let the signals that end a program do so without Python, which may be waiting inside a library."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
