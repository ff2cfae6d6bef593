"""All ranks of one mesh on one host, the segment they share, and how they come to share it.

      rank 0                         store                          every rank
      makes a segment, writes ──► offer: process, descriptor ──►  opens it and looks for the secret
      a secret into it                                                │
                         answer/0 .. answer/n-1: process or error ◄───┘
                              │
                              └──► all read all answers: either all use the segment, or none does

A rank on another host, in another process namespace or of another user cannot open the file or does not find the
secret; that is an answer like any other, and every rank comes to the same conclusion.

      │ secret │ notices, one per rank │ arena of rank 0 ........ │ arena of rank 1 ........ │ ...        the segment
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from meshwright.comm.group import CommunicationError
from meshwright.comm.shared.arena import Arena
from meshwright.comm.shared.process import Process
from meshwright.comm.shared.segment import Segment

_PAGE = 4096
_SECRET = 32
_NOTICE = 256
_LARGEST = 2**45
"""Bytes of address space for one segment: a quarter of what a process has."""


class UnavailableError(RuntimeError):
    """The ranks cannot share memory; the text says which rank found out and why. All ranks raise it alike."""


@dataclass(frozen=True)
class Host:
    """The ranks that share `segment`; this process is rank `rank` of them.

    Args:
        segment: the shared memory.
        rank: this process's rank, which is its place in `processes` too: all ranks of the mesh are on this host.
        processes: of every rank.
        arena: this rank's own part of the segment.
        store: where groups tell each other what is where.
        timeout: seconds that a rank waits for another before it gives up.
        spin: seconds that a rank looks at a word before it goes to sleep.
    """

    segment: Segment
    rank: int
    processes: tuple[Process, ...]
    arena: Arena
    store: dist.Store
    timeout: float
    spin: float

    def notice(self, text: str) -> None:
        """Let the others know what this rank waits for; an empty text: for nothing."""
        start = _PAGE + self.rank * _NOTICE
        self.segment.bytes[start : start + _NOTICE] = text.encode()[:_NOTICE].ljust(_NOTICE, b"\0")

    def read_notice(self, rank: int) -> str:
        """What `rank` says that it waits for."""
        start = _PAGE + rank * _NOTICE
        return bytes(self.segment.bytes[start : start + _NOTICE]).rstrip(b"\0").decode(errors="ignore")

    def exchange(self, name: str, ranks: tuple[int, ...], value: int) -> tuple[int, ...]:
        """What each of `ranks` gave for `value`; all of them must call this with the same, otherwise unused `name`."""
        self.store.set(f"{name}/{self.rank}", str(value))
        texts = _read(self.store, [f"{name}/{rank}" for rank in ranks], self.timeout, f"the shared memory of {name}")
        return tuple(int(text) for text in texts)


@dataclass(frozen=True)
class _Offer:
    process: int
    file: int
    size: int
    secret: str
    error: str = ""


@dataclass(frozen=True)
class _Answer:
    process: int
    started: int
    error: str = ""


def join(store: dist.Store, rank: int, ranks: int, timeout: float) -> Host:
    """Share memory with the other `ranks`, who all call this with the same part of a store.

    Raises:
        UnavailableError: some rank could not; every rank raises it.
        CommunicationError: a rank did not call this within `timeout` seconds.
    """
    part = min(os.sysconf("SC_PHYS_PAGES") * _PAGE, _LARGEST // ranks // _PAGE * _PAGE)
    arenas = _PAGE + -(-ranks * _NOTICE // _PAGE) * _PAGE
    segment, file = None, -1
    if rank == 0:
        segment, offer, file = _make(arenas + ranks * part)
        store.set("offer", json.dumps(asdict(offer)))
    else:
        offer = _Offer(**json.loads(_read(store, ["offer"], timeout, "the start of shared memory")[0]))
    answer = _Answer(0, 0, offer.error)
    if not offer.error:
        try:
            segment = segment or _find(offer)
            this = Process.of(os.getpid())
            answer = _Answer(this.number, this.started)
        except OSError as error:
            answer = _Answer(0, 0, f"rank {rank}: {error}")
    store.set(f"answer/{rank}", json.dumps(asdict(answer)))
    texts = _read(store, [f"answer/{each}" for each in range(ranks)], timeout, "the start of shared memory")
    if file >= 0:  # everybody has opened it
        os.close(file)
    answers = [_Answer(**json.loads(text)) for text in texts]
    errors = {each.error: None for each in answers if each.error}  # a set that keeps its order
    if errors or segment is None:
        raise UnavailableError("; ".join(errors))
    processes = tuple(Process(each.process, each.started) for each in answers)
    arena = Arena(arenas + rank * part, arenas + (rank + 1) * part)
    return Host(segment, rank, processes, arena, store, timeout, _spin(ranks))


def _make(size: int) -> tuple[Segment | None, _Offer, int]:
    try:
        segment, file = Segment.create(size)
    except (OSError, ValueError, OverflowError) as error:
        return None, _Offer(0, 0, 0, "", f"rank 0: {error}"), -1
    secret = secrets.token_hex(_SECRET // 2)
    segment.bytes[:_SECRET] = secret.encode()
    return segment, _Offer(os.getpid(), file, size, secret), file


def _find(offer: _Offer) -> Segment:
    segment = Segment.open(offer.process, offer.file, offer.size)
    if bytes(segment.bytes[:_SECRET]) != offer.secret.encode():
        raise OSError(f"process {offer.process} here is not rank 0")
    return segment


def _spin(ranks: int) -> float:
    """About as long as it takes to wake a processor, if every rank can have one; else nothing."""
    return 1e-4 if ranks <= len(os.sched_getaffinity(0)) else 0.0


def _read(store: dist.Store, keys: list[str], timeout: float, what: str) -> list[str]:
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = ", ".join(key for key in keys if not store.check([key]))
        raise CommunicationError(f"{what}: missing after {timeout:g} s: {absent}") from error
    return [store.get(key).decode() for key in keys]
