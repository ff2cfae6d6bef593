"""Messages through shared memory: in order, whole, without waiting for the receiver, and never a deadlock."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.comm.connect import Groups
from meshwright.comm.shared.channel import DEPTH, SharedChannel
from meshwright.layout.mesh import Mesh
from pool import RankPool

pytestmark = pytest.mark.ranks

MANY = 2 * DEPTH + 5


def message(number: int, rank: int) -> Tensor:
    """Of all sizes and some dtypes, known to both ends."""
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    return torch.full((1 + number * 37 % 5000,), float(number * 8 + rank)).to(dtype)


def both_send_first(groups: Groups) -> None:
    """Far more messages than a ring holds, both ways, before either receives any."""
    channel, here, there = groups.activations, groups.rank, 1 - groups.rank
    assert isinstance(channel, SharedChannel)
    sends = [channel.send(message(number, here), there) for number in range(MANY)]
    buffers = [torch.empty_like(message(number, there)) for number in range(MANY)]
    receives = [channel.receive(buffer, there) for buffer in buffers]
    for handle in reversed(receives):
        handle.wait()
    for handle in sends:
        handle.wait()
    for number, buffer in enumerate(buffers):
        assert torch.equal(buffer, message(number, there)), number


def test_ranks_that_send_more_than_a_ring_holds_before_they_receive_do_not_wait_for_each_other(pool: RankPool) -> None:
    pool.run(Mesh(pipeline=2), both_send_first)


def flooded(groups: Groups) -> None:
    """The sender waits for nobody while there is room, and the receiver has not even begun."""
    if groups.rank == 0:
        for number in range(DEPTH):
            groups.gradients.send(message(number, 0), 1).wait()
        groups.world.barrier()
        groups.gradients.send(message(DEPTH, 0), 1).wait()
    else:
        groups.world.barrier()
        for number in range(DEPTH + 1):
            buffer = torch.empty_like(message(number, 0))
            groups.gradients.receive(buffer, 0).wait()
            assert torch.equal(buffer, message(number, 0))


def test_a_send_does_not_need_the_receiver_while_there_is_room(pool: RankPool) -> None:
    pool.run(Mesh(pipeline=2), flooded)


def kept_up(groups: Groups) -> int:
    """Bytes of memory that the sender takes for many messages of which one at a time is on its way."""
    assert groups.wiring is not None and groups.wiring.host is not None
    before = groups.wiring.host.arena.taken
    for number in range(50):
        tensor = torch.full((100_000,), float(number))
        if groups.rank == 0:
            groups.activations.send(tensor, 2).wait()
        elif groups.rank == 2:
            groups.activations.receive(tensor, 0).wait()
        groups.pipeline.barrier()
    return groups.wiring.host.arena.taken - before


def test_a_sender_uses_the_same_memory_again_while_the_receiver_keeps_up(pool: RankPool) -> None:
    taken = pool.run(Mesh(pipeline=3), kept_up)
    assert taken[0] <= 2 * 400_000 + 64
    assert taken[1:] == [0, 0]


def reshaped(groups: Groups) -> None:
    with pytest.raises(ValueError, match=r"send of activations: the tensor \(2, 3\) is not contiguous"):
        groups.activations.send(torch.zeros(3, 2).t(), 1)
    if groups.rank == 0:
        groups.activations.send(torch.arange(6.0).view(1, 2, 3), 1).wait()
    else:
        buffer = torch.empty(3, 2)
        groups.activations.receive(buffer, 0).wait()
        assert torch.equal(buffer, torch.arange(6.0).view(3, 2))


def test_a_message_is_its_elements_in_whatever_shape(pool: RankPool) -> None:
    pool.run(Mesh(pipeline=2), reshaped)
