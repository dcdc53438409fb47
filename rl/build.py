"""Typed sections from nested mappings: what is unknown, missing or mistyped is told by name, all of it at once."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

UNLESS = "unless"
"""in a field's metadata: the section with which it has a default, and without which it must be given"""


def build(cls: type, given: Mapping[str, Any], where: str = "config") -> Any:
    """A section from nested mappings.

    Raises:
        ValueError: every unknown, missing or mistyped key below `where`, named, in one error.
    """
    errors: list[str] = []
    result = _build(cls, given, where, errors)
    if errors:
        raise ValueError("; ".join(errors))
    return result


def pick(cls: type, section: Any) -> Any:
    """The part of a section that is a `cls`: its fields, by name."""
    return cls(**{item.name: getattr(section, item.name) for item in dataclasses.fields(cls)})


def _build(cls: type, given: Mapping[str, Any], where: str, errors: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    before = len(errors)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
            errors.append(f"{where}.{name}: unknown key; {fix}")
    values = {}
    for name, item in known.items():
        if name in given:
            values[name] = _value(hints[name], given[name], f"{where}.{name}", errors)
        elif _required(item, given):
            errors.append(f"{where}.{name}: missing; set it in the config file")
    if len(errors) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        errors.append(f"{where}: {error}")
        return None


def _required(item: dataclasses.Field, given: Mapping[str, Any]) -> bool:
    if UNLESS in item.metadata:
        return given.get(item.metadata[UNLESS]) is None
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _value(hint: Any, value: Any, where: str, errors: list[str]) -> Any:
    if isinstance(value, Mapping) and typing.get_origin(hint) is types.UnionType:  # of a section and None
        hint = next((each for each in typing.get_args(hint) if dataclasses.is_dataclass(each)), hint)
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        assert isinstance(hint, type)
        return _build(hint, value, where, errors)
    if origin is Mapping and isinstance(value, Mapping):
        of = typing.get_args(hint)[1]
        return {key: _value(of, item, f"{where}.{key}", errors) for key, item in value.items()}
    try:
        return _plain(hint, value)
    except TypeError:
        if origin is typing.Literal:
            expected = f"one of {typing.get_args(hint)}"
        else:
            expected = hint.__name__ if isinstance(hint, type) and origin is not tuple else str(hint)
        errors.append(f"{where}: expected {expected}, got {value!r}")
        return value


def _plain(hint: Any, value: Any) -> Any:
    """The value as its hint says: lists become tuples, ints floats. TypeError where it does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (origin is typing.Literal and value in inner):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_plain(inner[0], item) for item in value)
    if origin is types.UnionType:
        for each in inner:
            try:
                return _plain(each, value)
            except TypeError:
                pass
    number = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and number:
        return float(value)
    if origin is None and isinstance(hint, type) and isinstance(value, hint) and (hint is not int or number):
        return value
    raise TypeError
