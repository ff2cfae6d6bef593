"""Which parameters of any `nn.Module` are gathered, reduced and updated together, and whose calls need them.

A *block* is a set of parameters and the modules that read them: normally one module with all that is inside it. The
modules at which blocks begin are chosen by class, by a bound on their parameters, or by a function; what is outside of
all of them belongs to the whole module. A parameter that several blocks read is a block of its own, which each of their
calls needs.

      root ┬ embedding         ← block                     units=Layer, or the classes that the module itself names
           ├ layers ┬ 0: Layer ← block                     in `_no_split_modules`, as Hugging Face's models do; or
           │        └ 1: Layer ← block                     units=100_000, the most parameters of one block; or
           └ norm              ← in the root's block       units=lambda name, module: ...

Nothing here knows about sharding. ZeRO (Rajbhandari et al., 2020), section 5.3, gathers "the parameters of a layer".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.parallel.absent import AbsentParameter
from meshwright.parallel.parameter import DescribedParameter, Given, ParameterSpec

ChoiceOfBlocks = Callable[[str, nn.Module], bool]
Units = type[nn.Module] | tuple[type[nn.Module], ...] | int | ChoiceOfBlocks | None
"""How to divide a module into blocks: by class, by size, by a function of name and module; None: what is sensible."""

_DIVISOR = 8
"""Without being told, no block gets more than this part of all parameters, if modules are small enough."""

# These read the parameters of the modules inside them without calling those.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase)


def _is_indivisible(module: nn.Module) -> bool:
    return isinstance(module, _INDIVISIBLE) or is_parametrized(module)


def _is_called(module: nn.Module) -> bool:
    """Whether it computes something: containers such as ModuleList and ParameterList are only looked into."""
    return type(module).forward is not nn.Module.forward


@dataclass(frozen=True)
class Key:
    """What the parameters of one flat unit have in common."""

    dtype: torch.dtype
    trainable: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.trainable else f"{dtype}, frozen"


@dataclass(frozen=True)
class Block:
    """Parameters by the kind of unit they make, and the modules whose calls need them."""

    name: str
    modules: tuple[nn.Module, ...]
    members: Mapping[Key, tuple[DescribedParameter, ...]]


@dataclass
class _Found:
    """One parameter while the module is searched."""

    parameter: nn.Parameter
    places: list[tuple[str, nn.Module, str]] = field(default_factory=list)


def divide(module: nn.Module, units: Units, group_of: Callable[[nn.Parameter], int]) -> tuple[Block, ...]:
    """The blocks of `module`, in the order in which their first parameters were registered.

    `group_of` tells the optimizer group of a parameter that is trained.

    Raises:
        ValueError: there is no parameter, or one that has no values yet or is complex.
    """
    parameters = _parameters(module)
    roots = _roots(module, units)
    by_homes: dict[tuple[str, ...], list[_Found]] = {}
    for found in parameters:
        homes = sorted({_home(path, roots) for path, _, _ in found.places})
        by_homes.setdefault(tuple(homes), []).append(found)
    if not by_homes:
        raise ValueError(f"{type(module).__name__} has no parameters; there is nothing to divide or to train")
    return tuple(
        Block(_title(homes), tuple(roots[home] for home in homes), _members(found, group_of))
        for homes, found in by_homes.items()
    )


def _title(homes: tuple[str, ...]) -> str:
    return " and ".join(home or "(root)" for home in homes)


def _members(
    found: Iterable[_Found], group_of: Callable[[nn.Parameter], int]
) -> Mapping[Key, tuple[DescribedParameter, ...]]:
    members: dict[Key, list[DescribedParameter]] = {}
    for one in found:
        path, _, attribute = one.places[0]
        name = f"{path}.{attribute}" if path else attribute
        key = Key(one.parameter.dtype, one.parameter.requires_grad)
        group = group_of(one.parameter) if key.trainable else 0
        spec = ParameterSpec(tuple(one.parameter.shape), Given())
        members.setdefault(key, []).extend(
            DescribedParameter(name, owner, attribute, spec, group) for _, owner, attribute in one.places
        )
    return {key: tuple(parameters) for key, parameters in members.items()}


def _parameters(module: nn.Module) -> Iterable[_Found]:
    """Every parameter once, with all places that read it."""
    found: dict[int, _Found] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(parameter, AbsentParameter):
                raise ValueError(f"the parameter {name} is divided already; divide a module once only")
            if parameter.is_meta or isinstance(parameter, nn.UninitializedParameter):
                raise ValueError(f"the parameter {name} has no values yet; make the module on a real device first")
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"the parameter {name} has hooks, and another takes its place; register them on those that "
                    "the module has afterwards, and divide a module once only"
                )
            if parameter.is_complex() and parameter.requires_grad:
                raise ValueError(f"the parameter {name} is complex; train its real view (torch.view_as_real) instead")
            found.setdefault(id(parameter), _Found(parameter)).places.append((path, owner, attribute))
    return found.values()


def _home(path: str, roots: Mapping[str, nn.Module]) -> str:
    """The innermost root that a module is in."""
    while path not in roots:
        path = path.rpartition(".")[0]
    return path


def _roots(module: nn.Module, units: Units) -> Mapping[str, nn.Module]:
    """The modules at which blocks begin, by name; the whole module is one of them."""
    if units is None:
        units = _named_by(module) or max(1, _numel(module) // _DIVISOR)
    roots: dict[str, nn.Module] = {"": module}
    if isinstance(units, int):
        if units < 1:
            raise ValueError(f"units={units} leaves no parameter for a block; take at least 1")
        return roots | dict(_within("", module, units))
    chosen = _by_class(module, units) if isinstance(units, type | tuple) else units
    return roots | {name: inner for name, inner in _divisible("", module) if chosen(name, inner)}


def _by_class(module: nn.Module, classes: type[nn.Module] | tuple[type[nn.Module], ...]) -> ChoiceOfBlocks:
    found = [inner for inner in module.modules() if isinstance(inner, classes)]
    if not found:
        names = sorted({type(inner).__name__ for inner in module.modules()})
        wanted = " or ".join(one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,)))
        raise ValueError(f"units: the module has no {wanted}; it has {', '.join(names)}")
    if not any(_is_called(inner) for inner in found):
        raise ValueError(f"units: {type(found[0]).__name__} is never called, it only holds modules; take what it holds")
    return lambda name, inner: isinstance(inner, classes)


def _divisible(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """All modules inside of `module` at which a block may begin."""
    if _is_indivisible(module):
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _is_called(child):
            yield path, child
        yield from _divisible(path, child)


def _named_by(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes that the module itself says to keep whole."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return tuple({type(inner) for inner in module.modules() if type(inner).__name__ in names})


def _within(name: str, module: nn.Module, bound: int) -> Iterable[tuple[str, nn.Module]]:
    """The outermost modules with at most `bound` parameters, and larger ones that have parameters of their own."""
    if _is_indivisible(module):
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        size = _numel(child)
        if size == 0:
            continue
        inside = any(True for _ in child.children()) and not _is_indivisible(child)
        own = any(parameter is not None for parameter in child._parameters.values())
        # What is in a Sequential is often called one by one, as what is in a ModuleList.
        called = _is_called(child) and type(child) is not nn.Sequential
        if called and (size <= bound or not inside or own):
            yield path, child
        if size > bound or not called:
            yield from _within(path, child, bound)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
