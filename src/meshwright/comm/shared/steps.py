"""What one member of a group does for each collective, once all have posted the same one.

Which way it goes follows from the call and from the places of all tensors, which every member sees; so all take the
same way without a word:

    small     the data stand beside the signatures, and every member reads what it needs
    shared    the tensors are in the segment: peers read them in place, and all meet before anyone may change them
    whole     the target is one memory for all members: each writes its own part, or has written it already
    pieces    anything else goes through the members' staging areas, in pieces that stay in the cache:

      copy in     piece 0   piece 1   piece 2        all members meet between two columns: while piece 1 is copied in,
      sum                   piece 0   piece 1        piece 0 is summed, each member its own part; a slot of the
      copy out                        piece 0        staging area is free again after as many columns as there are rows

A body returns whether all must meet at its end: whether a peer may still read what the caller may then change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from torch import Tensor

from meshwright.comm.ledger import Kind
from meshwright.comm.reduce import combine
from meshwright.comm.shared.board import SMALL, Board, Places
from meshwright.comm.shared.copy import copy
from meshwright.comm.shared.progress import Gate
from meshwright.comm.shared.signature import Signature

PIECE = 1024 * 1024
"""Bytes of a slot of the staging area."""

SLOTS = 3
"""Slots of the staging area: the rows of the picture above."""

Body = Generator[Gate, None, bool]


@dataclass(frozen=True)
class Call:
    """One collective on this member: 1-D tensors, the same one twice where it works in place; the signature packed."""

    number: int
    signature: Signature
    packed: bytes
    source: Tensor
    target: Tensor

    @property
    def small(self) -> bool:
        """Whether what a member gives fits beside its signature; the same on all members."""
        return self.source.numel() * self.source.element_size() <= SMALL


class Collective:
    """`call` on the member to whom `board` belongs."""

    def __init__(self, board: Board, call: Call) -> None:
        self._board = board
        self._call = call
        self._me = board.index
        self._size = len(board.ranks)
        self._dtype = call.signature.dtype
        self._itemsize = call.source.element_size()

    def body(self) -> Body:
        """The steps between the post and the end."""
        match self._call.signature.kind:
            case Kind.ALL_REDUCE:
                return self._all_reduce()
            case Kind.REDUCE_SCATTER:
                return self._reduce_scatter()
            case Kind.ALL_GATHER:
                return self._all_gather()
            case Kind.BROADCAST:
                return self._broadcast()
            case Kind.BARRIER:
                return self._barrier()
            case Kind.ALL_TO_ALL:
                return self._all_to_all()
            case Kind.SEND | Kind.RECEIVE as kind:
                raise NotImplementedError(f"{kind} in a group")
            case kind:
                assert_never(kind)

    # --- the collectives -----------------------------------------------------------------------------------------

    def _barrier(self) -> Body:
        return False
        yield  # a generator without a step

    def _all_reduce(self) -> Body:
        target, reduction = self._call.target, self._call.signature.reduction
        sources = self._readable()
        if self._call.small and sources is not None:
            combine(sources, target, reduction)
            return False
        if sources is not None:
            own = self._part(self._me, target.numel())
            combine([source[own] for source in sources], target[own], reduction)
            self._board.tick()
            yield self._board.reached(self._board.clock)
            for member in self._others():
                part = self._part(member, target.numel())
                copy(sources[member][part], target[part])
            return True
        yield from self._all_reduce_in_pieces()
        return False

    def _all_reduce_in_pieces(self) -> Generator[Gate, None, None]:
        target, reduction = self._call.target, self._call.signature.reduction
        pieces = _pieces(target.numel(), PIECE // self._itemsize)

        def put_in(index: int) -> None:
            piece = target[pieces[index]]
            slot, own = self._slot(self._me, index, piece.numel()), self._part(self._me, piece.numel())
            for rest in (slice(0, own.start), slice(own.stop, piece.numel())):
                copy(piece[rest], slot[rest])

        def reduce(index: int) -> None:
            piece = target[pieces[index]]
            own = self._part(self._me, piece.numel())
            parts = [self._slot(member, index, piece.numel())[own] for member in range(self._size)]
            given, parts[self._me] = parts[self._me], piece[own]
            combine(parts, piece[own], reduction)
            copy(piece[own], given)

        def take_out(index: int) -> None:
            piece = target[pieces[index]]
            for member in self._others():
                part = self._part(member, piece.numel())
                copy(self._slot(member, index, piece.numel())[part], piece[part])

        return self._pipeline(len(pieces), put_in, reduce, take_out)

    def _reduce_scatter(self) -> Body:
        source, target, reduction = self._call.source, self._call.target, self._call.signature.reduction
        own = slice(self._me * target.numel(), (self._me + 1) * target.numel())
        sources = self._readable()
        if sources is not None:
            combine([each[own] for each in sources], target, reduction)
            return not self._call.small
        rows = source.view(self._size, -1)
        pieces = _pieces(target.numel(), max(1, PIECE // self._itemsize // self._size))

        def put_in(index: int) -> None:
            piece = rows[:, pieces[index]]
            slot = self._slot(self._me, index, piece.numel()).view(piece.shape)
            for member in self._others():
                copy(piece[member], slot[member])

        def reduce(index: int) -> None:
            result = target[pieces[index]]
            width = result.numel()
            parts = [
                self._slot(member, index, self._size * width)[self._me * width : (self._me + 1) * width]
                for member in range(self._size)
            ]
            parts[self._me] = rows[self._me, pieces[index]]
            combine(parts, result, reduction)

        yield from self._pipeline(len(pieces), put_in, reduce)
        return False

    def _all_gather(self) -> Body:
        source, target = self._call.source, self._call.target
        shards = target.view(self._size, -1)
        held = shards[self._me].data_ptr() == source.data_ptr()
        if self._one_target():
            if not held:
                copy(source, shards[self._me])
            # Who held its part already wrote it before its post; who did not has only now.
            return not all(self._held(member) for member in range(self._size))
        if not held:
            copy(source, shards[self._me])
        sources = self._readable()
        if sources is not None:
            for member in self._others():
                copy(sources[member], shards[member])
            return not self._call.small
        pieces = _pieces(source.numel(), PIECE // self._itemsize)

        def put_in(index: int) -> None:
            piece = source[pieces[index]]
            copy(piece, self._slot(self._me, index, piece.numel()))

        def take_out(index: int) -> None:
            for member in self._others():
                piece = shards[member, pieces[index]]
                copy(self._slot(member, index, piece.numel()), piece)

        yield from self._pipeline(len(pieces), put_in, take_out)
        return False

    def _broadcast(self) -> Body:
        tensor, root = self._call.target, self._call.signature.root
        if self._one_target():
            return False
        if self._call.small:
            if self._me != root:
                copy(self._small(root), tensor)
            return False
        place = self._places[root].source
        if place is not None:
            if self._me != root:
                copy(self._board.host.segment.tensor(place, tensor.numel(), self._dtype), tensor)
            return True
        pieces = _pieces(tensor.numel(), PIECE // self._itemsize)

        def put_in(index: int) -> None:
            if self._me == root:
                piece = tensor[pieces[index]]
                copy(piece, self._slot(root, index, piece.numel()))

        def take_out(index: int) -> None:
            if self._me != root:
                piece = tensor[pieces[index]]
                copy(self._slot(root, index, piece.numel()), piece)

        yield from self._pipeline(len(pieces), put_in, take_out)
        return False

    def _all_to_all(self) -> Body:
        source, target = self._call.source, self._call.target
        given, taken = source.view(self._size, -1), target.view(self._size, -1)
        copy(given[self._me], taken[self._me])
        sources = self._readable()
        if sources is not None:
            for member in self._others():
                copy(sources[member].view(self._size, -1)[self._me], taken[member])
            return not self._call.small
        pieces = _pieces(given.shape[1], max(1, PIECE // self._itemsize // self._size))

        def put_in(index: int) -> None:
            piece = given[:, pieces[index]]
            slot = self._slot(self._me, index, piece.numel()).view(piece.shape)
            for member in self._others():
                copy(piece[member], slot[member])

        def take_out(index: int) -> None:
            for member in self._others():
                piece = taken[member, pieces[index]]
                slot = self._slot(member, index, self._size * piece.numel()).view(self._size, -1)
                copy(slot[self._me], piece)

        yield from self._pipeline(len(pieces), put_in, take_out)
        return False

    # --- what they are made of -----------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> tuple[Places, ...]:
        """Where all members' tensors are; they stay on the board until this member ends the operation."""
        return self._board.places(self._call.number)

    def _pipeline(self, pieces: int, *rows: Callable[[int], None]) -> Generator[Gate, None, None]:
        """Do `rows` for each piece, one column later each; all meet before a column."""
        base = self._board.clock
        for column in range(pieces + len(rows) - 1):
            yield self._board.reached(base + column)
            for row, act in enumerate(rows):
                if 0 <= column - row < pieces:
                    act(column - row)
            self._board.tick()

    def _others(self) -> list[int]:
        """The other members, each member beginning with the next, so that not all read the same memory at once."""
        return [(self._me + distance) % self._size for distance in range(1, self._size)]

    def _part(self, member: int, numel: int) -> slice:
        """Which of `numel` elements `member` sums."""
        return slice(numel * member // self._size, numel * (member + 1) // self._size)

    def _small(self, member: int) -> Tensor:
        return self._board.small(member, self._call.number, self._call.source.numel(), self._dtype)

    def _slot(self, member: int, piece: int, numel: int) -> Tensor:
        staging = self._places[member].staging
        assert staging is not None, "allocated by the post of anything that is not small"
        return self._board.host.segment.tensor(staging + piece % SLOTS * PIECE, numel, self._dtype)

    def _readable(self) -> list[Tensor] | None:
        """Every member's source, if all stand where others can read them: beside the signatures, or in the segment."""
        if self._call.small:
            return [self._small(member) for member in range(self._size)]
        segment, numel = self._board.host.segment, self._call.source.numel()
        offsets = [places.source for places in self._places if places.source is not None]
        if len(offsets) < self._size:
            return None
        return [segment.tensor(offset, numel, self._dtype) for offset in offsets]

    def _one_target(self) -> bool:
        """Whether the target is the same memory for all members."""
        if self._board.host.segment.offset(self._call.target) is None:
            return False
        return len({places.target for places in self._places}) == 1

    def _held(self, member: int) -> bool:
        """Whether the source of `member` is its own part of the target."""
        places, nbytes = self._places[member], self._call.source.numel() * self._itemsize
        return places.target is not None and places.source == places.target + member * nbytes


def _pieces(numel: int, size: int) -> list[slice]:
    """`numel` elements in runs of `size`; the last may be shorter."""
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]
