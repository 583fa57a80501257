"""Flags declared as dataclass fields: one place for a flag's name, type, default, choices and help.

A dataclass whose fields are made by ``flag()`` gives a command-line parser, a reader of keyword arguments and a
reader of YAML mappings. ``config/docs.py`` writes the reference page from the same declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fenceline.config.errors import ConfigError

_METADATA_KEY = "flag"
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_EXPECTED_MANY: dict[type[Any], str] = {int: "whole numbers with spaces between them"}

Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """What a ``flag()`` declares beyond the field's name, type and default."""

    help: str
    group: str
    aliases: tuple[str, ...] = ()
    choices: tuple[Scalar, ...] | None = None
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a class of flags: name ``page_size``, option ``--page-size``, ``type`` one of the scalars.

    With ``many`` the value is a tuple of them: a list in YAML, words after the option on the command line.
    """

    name: str
    type: type[Scalar]
    optional: bool
    many: bool
    default: Value | None
    spec: FlagSpec

    @property
    def option(self) -> str:
        """The flag's spelling on the command line."""
        return option_of(self.name)

    @property
    def options(self) -> tuple[str, ...]:
        """Every spelling of the flag, the usual one first."""
        return (self.option, *self.spec.aliases)


def flag(default: Value | None, help: str, *, group: str, **spec: Any) -> Any:
    """A dataclass field that is a flag. ``spec`` is the rest of ``FlagSpec``."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: FlagSpec(help, group, **spec)})


def option_of(name: str) -> str:
    """``page_size`` as ``--page-size``."""
    return "--" + name.replace("_", "-")


def flags_of(cls: type[Any]) -> dict[str, Flag]:
    """The flags of a dataclass by field name, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        kind, optional, many = _flag_type(hints[field.name])
        assert field.default is not dataclasses.MISSING, f"{field.name}: made without flag()"
        spec = field.metadata[_METADATA_KEY]
        found[field.name] = Flag(field.name, kind, optional, many, field.default, spec)
    return found


def _flag_type(hint: Any) -> tuple[type[Scalar], bool, bool]:
    """The scalar type, whether None is allowed, whether there may be many: ``tuple[int, ...] | None``."""
    optional = isinstance(hint, types.UnionType)
    if optional:
        members = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        assert len(members) == 1, f"a flag has one type: {hint}"
        hint = members[0]
    many = typing.get_origin(hint) is tuple
    return typing.get_args(hint)[0] if many else hint, optional, many


def coerce(flag: Flag, value: object) -> Value | None:
    """``value`` (from the command line, YAML or a keyword argument) as the flag's type.

    Raises ConfigError if it does not fit the type, is not among the choices or is refused.
    """
    if value is None and flag.optional:
        return None
    if flag.many:
        return _coerce_many(flag, value)
    result = _convert(flag.type, value)
    if result is None:
        raise ConfigError(f"{flag.option} {value}: expected {_EXPECTED[flag.type]}")
    if str(result) in flag.spec.refused:
        raise ConfigError(f"{flag.option} {result}: not available, {flag.spec.refused[str(result)]}")
    if flag.spec.choices is not None and result not in flag.spec.choices:
        allowed = ", ".join(str(choice) for choice in flag.spec.choices)
        raise ConfigError(f"{flag.option} {result}: choose one of {allowed}")
    return result


def _coerce_many(flag: Flag, value: object) -> tuple[Scalar, ...]:
    """A list, or words in one text (``cuda-graph-bs: 1 2 4`` in YAML), or a single value."""
    if isinstance(value, str):
        value = value.split()
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    results = [_convert(flag.type, item) for item in items]
    found = tuple(result for result in results if result is not None)
    if len(found) < len(items):
        shown = " ".join(str(item) for item in items)
        raise ConfigError(f"{flag.option} {shown}: expected {_EXPECTED_MANY[flag.type]}")
    return found


def _convert(kind: type[Scalar], value: object) -> Scalar | None:
    """``value`` as ``kind`` or None. Numbers in text are read; a number is never taken for a text's boolean."""
    if kind is bool:
        return _to_bool(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    if kind is str:
        return str(value)
    try:
        if kind is int:
            return int(value) if not isinstance(value, float) or value.is_integer() else None
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if number - number == 0 else None  # neither infinite nor NaN


def _to_bool(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _TRUE_WORDS:
        return True
    return False if word in _FALSE_WORDS else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for the closest known word, or an empty text."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
