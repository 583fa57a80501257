"""Flags are declared as dataclass fields, in one place with their name, type, default, choices and help.

A dataclass whose fields are made by ``flag()`` can be read from a command line, from keyword arguments and from a YAML
file. Every error is one line. ``config/docs.py`` writes the reference page from the same declarations.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fenceline.config import ConfigError
from fenceline.config.refused import ELSEWHERE, Refusal, complaints

_METADATA_KEY = "flag"
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_EXPECTED_MANY: dict[type[Any], str] = {
    int: "whole numbers with spaces between them",
    str: "words with spaces between them",
}

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
    secret: bool = False  # the value is never shown, only whether it is given


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a class of flags, for example with name ``page_size`` and option ``--page-size``; ``type`` is a
    scalar type.

    With ``many`` the value is a tuple of scalars: a list in YAML, or several words after the option on the command
    line.
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
    """A dataclass field that is a flag. ``spec`` has the other fields of ``FlagSpec``. If the field's type is a
    ``Literal``, its values are the choices."""
    declared = FlagSpec(help, group, **spec)
    return dataclasses.field(default=default, repr=not declared.secret, metadata={_METADATA_KEY: declared})


def option_of(name: str) -> str:
    """``page_size`` as ``--page-size``."""
    return "--" + name.replace("_", "-")


_hints: dict[
    type[Any], dict[str, Any]
] = {}  # the types of flags; annotations are text, which takes time to evaluate


def flags_of(cls: type[Any]) -> dict[str, Flag]:
    """The flags of a dataclass by field name, in the order of declaration."""
    if cls not in _hints:
        _hints[cls] = typing.get_type_hints(cls)
    hints = _hints[cls]
    found = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, optional, many = _flag_type(hint)
        assert field.default is not dataclasses.MISSING, f"{field.name}: made without flag()"
        spec = field.metadata[_METADATA_KEY]
        if typing.get_origin(hint) is typing.Literal:
            spec = dataclasses.replace(spec, choices=typing.get_args(hint))
        found[field.name] = Flag(field.name, kind, optional, many, field.default, spec)
    return found


def _flag_type(hint: Any) -> tuple[type[Scalar], bool, bool]:
    """(the scalar type, whether None is allowed, whether it is a tuple) of a type such as ``tuple[int, ...] |
    None``."""
    optional = isinstance(hint, types.UnionType)
    if optional:
        members = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        assert len(members) == 1, f"a flag has one type: {hint}"
        hint = members[0]
    if typing.get_origin(hint) is typing.Literal:
        return type(typing.get_args(hint)[0]), optional, False
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
    """``value`` as a tuple: it may be a list, words in one text (``cuda-graph-bs: 1 2 4`` in YAML) or a single
    value."""
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
    """``value`` as ``kind``, None if it does not fit. Numbers in text are converted."""
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


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def build_parser(
    cls: type[Any], prog: str, description: str, refused: Mapping[str, Refusal]
) -> argparse.ArgumentParser:
    """A parser for the flags of ``cls``. Values stay text; ``coerce`` converts and checks them later."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s --model-path MODEL [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file of flags; the command line wins over it"
    )
    groups: dict[str, Any] = {}
    for flag in flags_of(cls).values():
        if flag.spec.group not in groups:
            groups[flag.spec.group] = parser.add_argument_group(flag.spec.group)
        _add_flag(groups[flag.spec.group], flag)
    for option in refused:
        parser.add_argument(option, dest=option, nargs="*", action="append", help=argparse.SUPPRESS)
    return parser


def _add_flag(group: Any, flag: Flag) -> None:
    text = flag.spec.help.replace("%", "%%")
    if flag.type is bool:
        group.add_argument(*flag.options, dest=flag.name, action="store_true", help=text)
        # Only needed to overrule a `true` of the YAML file.
        negative = f"--no-{flag.option[2:]}"
        group.add_argument(negative, dest=flag.name, action="store_false", help=argparse.SUPPRESS)
        return
    if flag.default is not None and flag.default != "":
        text += f" (default: {flag.default})".replace("%", "%%")
    metavar = flag.spec.metavar or flag.name.upper()
    if flag.spec.choices is not None:
        metavar = "{" + ",".join(str(choice) for choice in flag.spec.choices) + "}"
    nargs = "+" if flag.many else None
    group.add_argument(*flag.options, dest=flag.name, metavar=metavar, nargs=nargs, help=text)


def parse_values(
    parser: argparse.ArgumentParser, cls: type[Any], argv: Sequence[str], refused: Mapping[str, Refusal]
) -> dict[str, Any]:
    """The values that ``argv`` and the YAML file of its ``--config`` give to flags of ``cls``.

    Raises ConfigError, one line, for anything unknown, refused or of the wrong type.
    """
    namespace, extra = parser.parse_known_args(list(argv))
    given = vars(namespace)
    config_file = given.pop("config", None)
    _refuse([(option, words) for option in refused for words in given.pop(option, [])], refused)
    if extra:
        raise ConfigError(_unknown(extra[0], cls))
    values = read_mapping(config_file) if config_file is not None else {}
    return from_mapping(cls, values, refused) | from_mapping(cls, given, refused)


def _refuse(given: Sequence[tuple[str, Sequence[str]]], refused: Mapping[str, Refusal]) -> None:
    line = complaints(given, refused)
    if line is not None:
        raise ConfigError(line)


def _unknown(word: str, cls: type[Any]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}: every setting is a --flag; see --help"
    option = word.split("=", 1)[0]
    if option in ELSEWHERE:
        return f"{option} is another server's flag: {ELSEWHERE[option]}"
    known = ["--config", "--help", *(name for flag in flags_of(cls).values() for name in flag.options)]
    return f"unknown flag {option}{did_you_mean(option, known)}; see --help"


def from_mapping(
    cls: type[Any], values: Mapping[str, object], refused: Mapping[str, Refusal]
) -> dict[str, Any]:
    """Field values of ``cls`` from a mapping of names to values: keyword arguments, YAML, or a parsed command line.

    A name may be a field's or a flag's, with dashes or underscores, aliases included. Raises ConfigError.
    """
    flags = flags_of(cls)
    names = {option.lstrip("-").replace("-", "_"): flag for flag in flags.values() for option in flag.options}
    found: dict[str, Any] = {}
    refusals: list[tuple[str, list[str]]] = []
    for key, value in values.items():
        name = str(key).lstrip("-").replace("-", "_")
        option = "--" + name.replace("_", "-")
        if name in names:
            found[names[name].name] = coerce(names[name], _as_text(names[name], value))
        elif option in refused:
            if value is not None:
                refusals.append((option, _words(value)))
        elif option in ELSEWHERE:
            raise ConfigError(f"{key} is another server's setting: {ELSEWHERE[option]}")
        else:
            raise ConfigError(f"unknown setting {key}{did_you_mean(name, names)}")
    _refuse(refusals, refused)
    return found


def _as_text(flag: Flag, value: object) -> object:
    """A mapping given to a flag that takes JSON text is converted to such text; other values are returned unchanged."""
    return json.dumps(value) if flag.spec.metavar == "JSON" and isinstance(value, dict) else value


def _words(value: object) -> list[str]:
    if value is True:
        return []
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return ["false"] if value is False else [str(value)]


def read_mapping(path: str) -> dict[str, object]:
    """The top-level mapping of a YAML file, keys as text. Raises ConfigError, one line."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({_first_line(error)})") from error
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}: not valid YAML{where} ({_first_line(error)})") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: expected one mapping, as in 'page_size: 16'")
    return {str(key): item for key, item in value.items()}


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
