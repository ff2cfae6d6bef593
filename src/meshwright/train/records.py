"""Frozen dataclasses from TOML and the command line, and back to TOML: the types of the fields are the schema.

Knows the kinds of field that `train.config` has (numbers, words, switches, choices, lists of words, records in
records) and nothing about what they mean. Every mistake becomes a `ConfigError` that names where it stands, the key,
and the nearest key or value that works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.layout.nearest import nearest_word, one_of

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration cannot be used; the text names the file or the command line, the key, and what would work."""


@dataclass(frozen=True)
class Setting:
    """One value as it was given: where (a file or the command line), for which dotted key, and the value itself."""

    where: str
    key: str
    value: object


@dataclass(frozen=True)
class Key:
    """One key of a configuration: its dotted name, the type of its field, its default, and what it is for."""

    name: str
    kind: Any
    default: object
    about: str


def keys_of(record: type[Any], prefix: str = "") -> Iterator[Key]:
    """Every key of a record and of the records in it, in the order of their fields."""
    hints = get_type_hints(record)
    defaults = record()
    for field in fields(record):
        kind, name = hints[field.name], prefix + field.name
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from keys_of(kind, f"{name}.")
        else:
            yield Key(name, kind, getattr(defaults, field.name), field.metadata.get("about", ""))


def settings_of_table(
    table: Mapping[str, object], record: type[Any], where: str, prefix: str = ""
) -> Iterator[Setting]:
    """The settings of a parsed TOML table. Raises ConfigError where a value stands for a table."""
    hints = get_type_hints(record)
    for name, value in table.items():
        kind, key = hints.get(name), prefix + name
        if is_dataclass(kind):
            assert isinstance(kind, type)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {key} is a table; write [{key}] and its keys below it")
            yield from settings_of_table(value, kind, where, f"{key}.")
        else:
            yield Setting(where, key, value)


def settings_of_words(words: Sequence[str], record: type[Any], where: str) -> Iterator[Setting]:
    """The settings in command line words: `--key value`, `--key=value`, and `--key` alone for a switch.

    A dash in a key is an underscore. Values stay words: `build` reads them by the type of their key.
    """
    switches = {key.name for key in keys_of(record) if key.kind is bool}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f'{where}: "{word}" belongs to no key; write --key value')
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif name in switches:
                value = "true"
            else:
                _check_key(name, record, where)
                raise ConfigError(f"{where}: --{name} has no value; write --{name} VALUE")
        yield Setting(where, name, _Word(value))


def build(record: type[T], settings: Sequence[Setting]) -> T:
    """The record with the given settings, later ones before earlier ones, and its defaults for the rest.

    Raises ConfigError for an unknown key, a value of the wrong type, or values that the record itself refuses.
    """
    kinds = {key.name: key.kind for key in keys_of(record)}
    values: dict[str, Setting] = {}
    for setting in settings:
        _check_key(setting.key, record, setting.where)
        values[setting.key] = Setting(setting.where, setting.key, _read(kinds[setting.key], setting))
    return _assemble(record, values, "")


def to_toml(record: object, prefix: str = "") -> str:
    """The record as TOML that reads back to an equal one; a key that is None is left out."""
    lines: list[str] = []
    tables: list[str] = []
    for field in fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        value = getattr(record, field.name)
        if is_dataclass(value):
            tables.append(f"\n[{prefix}{field.name}]\n{to_toml(value, f'{prefix}{field.name}.')}")
        elif value is not None:
            lines.append(f"{field.name} = {_literal(value)}\n")
    return "".join(lines + tables)


class _Word(str):
    """A value from the command line, where everything is a word until its key's type says otherwise."""

    __slots__ = ()


def _assemble(record: type[T], values: Mapping[str, Setting], prefix: str) -> T:
    hints = get_type_hints(record)
    chosen: dict[str, object] = {}
    for field in fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        name = prefix + field.name
        if is_dataclass(hints[field.name]):
            chosen[field.name] = _assemble(hints[field.name], values, f"{name}.")
        elif name in values:
            chosen[field.name] = values[name].value
    try:
        return record(**chosen)
    except ValueError as error:  # what the record says about its own values; it cannot know where they came from
        blamed = values.get(prefix + str(error).partition("=")[0])
        if blamed is not None:
            raise ConfigError(f"{blamed.where}: {prefix}{error}") from error
        places = dict.fromkeys(setting.where for key, setting in values.items() if key.startswith(prefix))
        raise ConfigError(f"{' and '.join(places)}: {prefix}{error}") from error


def _check_key(name: str, record: type[Any], where: str) -> None:
    known = [key.name for key in keys_of(record)]
    if name in known:
        return
    if any(key.startswith(f"{name}.") for key in known):
        raise ConfigError(f"{where}: {name} is a table; name one of its keys, such as {_first_in(name, known)}")
    # A key given without its table ("layers") is nearer to "model.layers" than spelling alone says.
    inside = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    nearest = (
        inside[0] if inside else nearest_word(name, [*known, *(key.rpartition(".")[0] for key in known if "." in key)])
    )
    raise ConfigError(f"{where}: there is no key {name}; the nearest is {nearest}")


def _read(kind: Any, setting: Setting) -> object:
    """The value of a setting in the type of its key."""
    value, wanted = setting.value, kind
    if get_origin(kind) in (Union, UnionType):  # only "X or None" is used
        if isinstance(value, _Word) and value.lower() == "none":
            return None
        wanted = next(option for option in get_args(kind) if option is not NoneType)
    if get_origin(wanted) is Literal:
        return _read_choice(get_args(wanted), setting)
    if get_origin(wanted) is tuple:
        return _read_words(setting)
    if isinstance(value, _Word) and wanted is not str:
        value = _from_word(wanted, value)
    if wanted is float and type(value) is int:
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{setting.where}: {setting.key} is {value}; it must be a finite number")
    if wanted is str and isinstance(value, str):
        return str(value)
    if type(value) is not wanted:  # not isinstance: True is an int to Python, but not to a reader
        raise ConfigError(f"{setting.where}: {setting.key} is {_shown(setting.value)}; it must be {_NAMES[wanted]}")
    return value


def _from_word(wanted: type, word: _Word) -> object:
    """A command line word as a number or a switch; the word itself if it is none."""
    if wanted is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return wanted(word)
    except ValueError:
        return word


def _read_choice(options: tuple[Any, ...], setting: Setting) -> object:
    if setting.value in options:
        return str(setting.value)
    nearest = nearest_word(str(setting.value), options)
    choice = one_of(options)
    raise ConfigError(
        f"{setting.where}: {setting.key} is {_shown(setting.value)}; it must be {choice} (nearest: {nearest})"
    )


def _read_words(setting: Setting) -> tuple[str, ...]:
    value = setting.value
    if isinstance(value, _Word):
        return tuple(part for part in value.split(",") if part)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ConfigError(f'{setting.where}: {setting.key} is {_shown(value)}; it must be a list of words, ["a", "b"]')


_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a word in quotes, "like this"',
}


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _literal(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, float):
        return repr(value)  # json would write Infinity, TOML writes inf
    # JSON's escapes are TOML's, except that TOML does not allow a bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _first_in(table: str, known: Sequence[str]) -> str:
    return next(key for key in known if key.startswith(f"{table}."))
