"""Runs a Program: a flat match over its verbs, which knows nothing of pipelines, schedules or ZeRO stages.

Everything that decides *when* something happens was decided by the passes that lowered the program; everything that
decides *how* is in the stage, the units, the channels and the optimizer. When an action fails, the error carries a
note with the rank, the action, and the program around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import assert_never

from torch import Tensor

from meshwright.comm.channel import Channel
from meshwright.comm.connect import Groups
from meshwright.comm.group import Group, Handle
from meshwright.engine.stage import Flight, Keep, Stage
from meshwright.engine.tracer import Tracer
from meshwright.parallel.reductions import Reductions
from meshwright.schedule.op import Kind, Op
from meshwright.schedule.program import (
    Action,
    Backward,
    Forward,
    Gather,
    Program,
    Receive,
    Recompute,
    Reduce,
    Release,
    Send,
    Step,
    Sync,
    Tied,
)


def kept(program: Program) -> Mapping[tuple[int, int], Keep]:
    """What each (micro-batch, layer) of the program must keep for its backward: a graph, or an input to recompute."""
    keep: dict[tuple[int, int], Keep] = {}
    for action in program.actions:
        match action:
            case Recompute(op, layer):
                keep[op.micro_batch, layer] = Keep.INPUT
            case Backward(op, layer):
                keep.setdefault((op.micro_batch, layer), Keep.GRAPH)
            case _:
                pass
    return keep


class Outbox:
    """Messages on their way: the tensors stay untouched until they have left, and at most `limit` are under way.

    A limit of twice the pipeline's length never makes a rank wait for a peer that waits for it: by then the peer's
    program has passed the matching receive.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: deque[tuple[Handle, Tensor]] = deque()

    def send(self, channel: Channel, tensor: Tensor, peer: int) -> None:
        """Start a message, waiting first for the oldest one if too many are under way."""
        if len(self._under_way) >= self._limit:
            self._under_way.popleft()[0].wait()
        self._under_way.append((channel.send(tensor, peer), tensor))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()


class Interpreter:
    """Carries out the actions of programs on one rank's stage.

    `ties` maps the name of a tied unit to the group of the pipeline ranks that hold it; `on_step` is what the verb
    STEP calls.
    """

    def __init__(
        self, stage: Stage, groups: Groups, ties: Mapping[str, Group], on_step: Callable[[Flight], None]
    ) -> None:
        self.stage = stage
        self.groups = groups
        self.ties = ties
        self.on_step = on_step
        self._reducing = Reductions()
        self._outbox = {kind: Outbox(2 * groups.pipeline.size) for kind in Kind}

    def run(self, program: Program, flight: Flight, tracer: Tracer) -> None:
        """Carry out `program` on the micro-batches of `flight`; nothing is under way when this returns."""
        keep = kept(program)
        for index, action in enumerate(program.actions):
            tracer.begin(str(action))
            try:
                self._act(action, flight, keep)
            except Exception as error:
                where = f"rank {self.groups.rank} stands at action {index} of {len(program.actions)}: {action}"
                error.add_note(f"{where}\n{program.picture(index)}")
                raise
        for outbox in self._outbox.values():
            outbox.flush()
        for unit in self.stage.units.values():
            unit.settle()
        tracer.end()

    def _act(self, action: Action, flight: Flight, keep: Mapping[tuple[int, int], Keep]) -> None:
        units = self.stage.units
        match action:
            case Receive(op, peer):
                self._receive(op, peer, flight)
            case Send(op, peer):
                tensors = flight.activation if op.kind is Kind.FORWARD else flight.gradient
                self._outbox[op.kind].send(self._channel(op), tensors.pop(op.micro_batch), peer)
            case Forward(op, layer):
                self._hold(layer)
                self.stage.forward(flight, op.micro_batch, layer, keep.get((op.micro_batch, layer), Keep.NOTHING))
            case Recompute(op, layer):
                self._hold(layer)
                self.stage.recompute(flight, op.micro_batch, layer)
            case Backward(op, layer):
                self._hold(layer)
                self.stage.backward(flight, op.micro_batch, layer)
            case Gather(unit):
                units[unit].start_gather()
            case Release(unit):
                units[unit].release()
            case Reduce(unit):
                self._reducing.start(units[unit])
            case Sync(unit):
                units[unit].finish_reduce()
                units[unit].gradient.start_sync()
            case Tied(unit):
                units[unit].finish_reduce()
                units[unit].gradient.finish_sync()
                self.ties[unit].all_reduce(units[unit].gradient.owned, label="tied gradients")
            case Step():
                self._finish_gradients()
                self.on_step(flight)
            case _:
                assert_never(action)

    def _hold(self, layer: int) -> None:
        """Wait until what the layer reads is whole."""
        for unit in self.stage.cut.units(layer):
            self.stage.units[unit].whole()

    def _finish_gradients(self) -> None:
        """Wait for every reduction and every sum over replicas."""
        self._reducing.finish()
        for unit in self.stage.units.values():
            unit.gradient.finish_sync()

    def _receive(self, op: Op, peer: int, flight: Flight) -> None:
        tensor = self.stage.empty_activation(flight.batches[op.micro_batch])
        self._channel(op).receive(tensor, peer).wait()
        (flight.activation if op.kind is Kind.FORWARD else flight.gradient)[op.micro_batch] = tensor

    def _channel(self, op: Op) -> Channel:
        return self.groups.activations if op.kind is Kind.FORWARD else self.groups.gradients
