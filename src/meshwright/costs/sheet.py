"""The cost sheet of a GPT: a row per layer saying parameters, what tensor parallelism divides of them, and FLOPs.

The planner sums it, `balance` cuts it, the trainer computes model FLOP/s from it. It counts, and does not measure;
the tests of `model` hold it against counters on the real modules.

One block, with biases (Narayanan et al., 2021, equation 2 and appendix; s, h, V as in the glossary):

    norm1        2h                                        replicated
    qkv          3h² + 3h        6 s h²  FLOPs per sample  divided, weight and bias (by heads)
    attention                    4 s² h                    scores and values: two products of full s x s, no causal half
    output       h² + h          2 s h²                    weight divided, bias replicated
    norm2        2h                                        replicated
    up           4h² + 4h        8 s h²                    divided, weight and bias
    down         4h² + h         8 s h²                    weight divided, bias replicated
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costs.spec import GPTSpec


@dataclass(frozen=True)
class Row:
    """The costs of one layer.

    `parameters`: the true count on this layer, without the padding of a split vocabulary; `split_parameters`: how
    many of them tensor parallelism divides by t; `flops`: FLOPs of the matrix products of one forward pass of one
    sample (s tokens), a multiply and an add counted as two, attention counted as full s x s.
    """

    name: str
    parameters: int
    split_parameters: int
    flops: int


def sheet(spec: GPTSpec) -> tuple[Row, ...]:
    """The rows of the layers in order: "embedding", "blocks.0", ..., "head" (L + 2 rows).

    The head's row counts its projection even when it is tied, since a stage that holds the head alone holds it.
    """
    blocks = (_block(spec, f"blocks.{index}") for index in range(spec.layers))
    return (_embedding(spec), *blocks, _head(spec))


def parameters(spec: GPTSpec) -> int:
    """Parameters of the whole model (elements); a tied projection is counted once."""
    repeated = _token_table(spec) if spec.tied else 0
    return sum(row.parameters for row in sheet(spec)) - repeated


def training_flops(spec: GPTSpec) -> int:
    """Model FLOPs of training on one sample of s tokens: forward and twice that backward, recompute not counted."""
    return 3 * sum(row.flops for row in sheet(spec))


def _token_table(spec: GPTSpec) -> int:
    return spec.vocabulary * spec.hidden


def _embedding(spec: GPTSpec) -> Row:
    table = _token_table(spec)
    return Row("embedding", table + spec.sequence * spec.hidden, table, 0)


def _block(spec: GPTSpec, name: str) -> Row:
    h, s = spec.hidden, spec.sequence
    bias = int(spec.bias)
    split = (3 * h * h + bias * 3 * h) + h * h + (4 * h * h + bias * 4 * h) + 4 * h * h
    replicated = 2 * _norm(spec) + bias * 2 * h
    return Row(name, split + replicated, split, 24 * s * h * h + 4 * s * s * h)


def _head(spec: GPTSpec) -> Row:
    table = _token_table(spec)
    return Row("head", _norm(spec) + table, table, 2 * spec.sequence * table)


def _norm(spec: GPTSpec) -> int:
    return spec.hidden * (1 + int(spec.bias))
