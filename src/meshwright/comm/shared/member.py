"""This rank as a member of one group: it starts collectives in order and carries each from its post to its end."""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.group import MismatchError
from meshwright.comm.shared.board import WINDOW, Board, Places
from meshwright.comm.shared.copy import copy
from meshwright.comm.shared.progress import Steps
from meshwright.comm.shared.signature import Signature
from meshwright.comm.shared.steps import PIECE, SLOTS, Call, Collective


class Member:
    """A member that posts on `board`; `group` names the group in errors."""

    def __init__(self, board: Board, group: str) -> None:
        self._board = board
        self._group = group
        self._started = self._posted = self._finished = 0
        self._ends = [0] * WINDOW  # the clock at the end of the last operations
        self._staging: int | None = None

    def start(self, signature: Signature, source: Tensor, target: Tensor) -> Steps:
        """Begin a collective; the steps that remain."""
        call = Call(self._started, signature, signature.pack(self._started), source, target)
        self._started += 1
        if self._posted == call.number and self._room(call.number):
            self._post(call)
        return self._steps(call)

    def _room(self, number: int) -> bool:
        """Whether all members are done with what stands in the place of operation `number` on the board."""
        if number < WINDOW:
            return True
        return number - WINDOW < self._finished and self._board.reached(self._ends[number % WINDOW]).is_open()

    def _post(self, call: Call) -> None:
        segment = self._board.host.segment
        if call.small and call.source.numel():
            numel, dtype = call.source.numel(), call.signature.dtype
            copy(call.source, self._board.small(self._board.index, call.number, numel, dtype))
        elif not call.small and self._staging is None:
            self._staging = self._board.host.arena.take(SLOTS * PIECE)
        places = Places(segment.offset(call.source), segment.offset(call.target), self._staging)
        self._board.post(call.number, call.packed, places)
        self._posted += 1

    def _steps(self, call: Call) -> Steps:
        if self._posted == call.number:  # there was no room at the start
            yield self._board.reached(self._ends[call.number % WINDOW])
            self._post(call)
        yield self._board.posted(call.number)
        try:
            self._board.check(call.number, call.packed, self._group)
        except MismatchError:  # every member finds it, and all can go on with the next operation
            self._end(call.number)
            raise
        meet = yield from Collective(self._board, call).body()
        self._end(call.number)
        if meet:
            yield self._board.reached(self._board.clock)

    def _end(self, number: int) -> None:
        self._board.tick()
        self._ends[number % WINDOW] = self._board.clock
        self._finished += 1
