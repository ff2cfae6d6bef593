"""32-bit words in shared memory that one process writes and others wait for: counters, never locks.

Linux's futex as a system call through ctypes, which lets other Python threads run meanwhile. A word is written and read
by a plain 4-byte access. That suffices on x86-64, where no processor lets another see a counter before the data that
were written ahead of it; elsewhere a barrier would be needed at each access, which Python does not offer, so there
`Words` refuses to work and the caller uses another transport.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct

WORD = 4
"""Bytes of a word."""

_SYS_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_MASK = 2**32 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> ctypes._NamedFuncPointer:
    if platform.system() != "Linux" or platform.machine() != "x86_64" or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"futexes are used on 64-bit Linux on x86-64 only, not on {platform.platform()}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    return call


class Words:
    """The words of a mapping, by their number from its beginning. Counters run modulo 2^32."""

    def __init__(self, mapping: mmap.mmap, address: int) -> None:
        """`address` is where `mapping` begins. Raises OSError where futexes cannot be used."""
        self._words = memoryview(mapping).cast("I")
        self._address = address
        self._call = _syscall()
        if self._call(_SYS_FUTEX, address, _FUTEX_WAKE, 1, None) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the system call futex is refused: {os.strerror(number)}")

    def load(self, word: int) -> int:
        """The value of `word` now."""
        return self._words[word]

    def behind(self, word: int, value: int) -> bool:
        """Whether the counter `word` has not yet reached `value`."""
        return bool((self._words[word] - value) & 0x8000_0000)

    def publish(self, word: int, value: int) -> None:
        """Set `word`, after everything this process wrote before, and wake all that wait for it."""
        self._words[word] = value & _MASK
        self._call(_SYS_FUTEX, self._address + WORD * word, _FUTEX_WAKE, _EVERYBODY, None)

    def sleep(self, word: int, seen: int, seconds: float) -> None:
        """Return when `word` is no longer `seen`, or after `seconds`, or for no reason."""
        time = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._call(_SYS_FUTEX, self._address + WORD * word, _FUTEX_WAIT, seen, ctypes.byref(time))
