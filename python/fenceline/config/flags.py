"""Flags are declared as dataclass fields, in one place with their name, type, default, choices and help.

A dataclass whose fields are made by ``flag()`` can be read from a command line, from keyword arguments and from a YAML
file. Every error is one line. ``scripts/flags_page.py`` writes the reference page from the same declarations.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from fenceline.config import ConfigError, user_path
from fenceline.config.help import HelpAction
from fenceline.config.refused import REFUSED, Refusal, find

logger = logging.getLogger(__name__)

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

_SPELLINGS = re.compile(r"^argument ([^/:]+)[^:]*:")  # how argparse names a flag: with all its names
_MOST_CHARS = 1 << 20  # of a file of flags
_SECRET = ("-token", "-password")  # what is given to such flags is not repeated
_SWITCHES = ("--enable-", "--disable-", "--no-", "--skip-", "--use-", "--enforce-")  # such flags take no word


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
    scalar type. With ``many`` the value is a tuple of scalars: a list in YAML, or several words after the option on the
    command line."""

    name: str
    type: type[Scalar]
    optional: bool
    many: bool
    default: Value | None
    spec: FlagSpec

    @property
    def option(self) -> str:
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


_read: dict[type[Any], Mapping[str, Flag]] = {}  # annotations are text, which takes time to evaluate


def flags_of(cls: type[Any]) -> Mapping[str, Flag]:
    """The flags of a dataclass by field name, in the order of declaration."""
    if cls not in _read:
        _read[cls] = _read_flags(cls)
    return _read[cls]


def _read_flags(cls: type[Any]) -> Mapping[str, Flag]:
    hints = typing.get_type_hints(cls)
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
    """(scalar type, whether None is allowed, whether it is a tuple) of a type such as ``tuple[int, ...] | None``."""
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
    """``value`` (from the command line, YAML or a keyword argument) as the flag's type. Raises ConfigError if it does
    not fit the type, is not among the choices or is refused."""
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
        for choice in flag.spec.choices:
            if str(choice).lower() == str(result).lower():  # in any case: INFO, Bfloat16
                return choice
        allowed = ", ".join(str(choice) for choice in flag.spec.choices)
        raise ConfigError(f"{flag.option} {result}: choose one of {allowed}")
    return result


def _coerce_many(flag: Flag, value: object) -> tuple[Scalar, ...]:
    """``value`` as a tuple: it may be a list, words in one text (``cuda-graph-bs: 1 2 4``) or a single value."""
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
        raise ConfigError(_SPELLINGS.sub(r"\1:", message))


def build_parser(cls: type[Any], prog: str, description: str, usual: Sequence[str]) -> argparse.ArgumentParser:
    """A parser for the flags of ``cls``; its help shows those that are named in ``usual`` unless it is asked for more.
    Values stay text; ``coerce`` converts and checks them later."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s MODEL [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=HelpAction, usual=("config", *usual))
    parser.add_argument("--config", metavar="FILE", help="A YAML file of flags; the command line wins over it")
    groups: dict[str, Any] = {}
    for flag in flags_of(cls).values():
        if flag.spec.group not in groups:
            groups[flag.spec.group] = parser.add_argument_group(flag.spec.group)
        _add_flag(groups[flag.spec.group], flag)
    return parser


def _add_flag(group: Any, flag: Flag) -> None:
    text = flag.spec.help.replace("%", "%%")
    if flag.type is bool:
        group.add_argument(*flag.options, dest=flag.name, action="store_true", help=text)
        # Only needed to overrule a `true` of the YAML file.
        group.add_argument(_negative(flag), dest=flag.name, action="store_false", help=argparse.SUPPRESS)
        return
    if flag.default is not None and flag.default != "":
        text += f" (default: {flag.default})".replace("%", "%%")
    metavar = flag.spec.metavar or flag.name.upper()
    if flag.spec.choices is not None:
        metavar = "{" + ",".join(str(choice) for choice in flag.spec.choices) + "}"
    nargs = "+" if flag.many else None
    group.add_argument(*flag.options, dest=flag.name, metavar=metavar, nargs=nargs, help=text)


def _negative(flag: Flag) -> str:
    return f"--no-{flag.option[2:]}"


class _Complaints:
    """Everything that is wrong with the settings of a start, to be said in one line, and what has no effect."""

    def __init__(self) -> None:
        self._refused: dict[str, list[str]] = {}  # uses of flags by remedy
        self._lines: list[str] = []
        self._hints: list[str] = []

    def judge(self, option: str, words: Sequence[str], refusal: Refusal) -> None:
        """Judge the use of another server's flag."""
        value = " ".join(words)
        if refusal.accepts(value):
            return
        use = option if option.endswith(_SECRET) else f"{option} {value}".rstrip()
        if refusal.hint:
            self._hints.append(use)
        else:
            self._refused.setdefault(refusal.remedy, []).append(use)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def settle(self) -> None:
        """Raise ConfigError if anything is wrong, and otherwise warn of what has no effect."""
        lines = [f"{', '.join(uses)}: not available, {remedy}" for remedy, uses in self._refused.items()]
        if lines or self._lines:
            raise ConfigError("; ".join(lines + self._lines))
        if self._hints:
            logger.warning("%s: without effect here, no answer changes by it", ", ".join(self._hints))


def parse_values(
    parser: argparse.ArgumentParser, cls: type[Any], argv: Sequence[str], positional: str
) -> dict[str, Any]:
    """The values that ``argv`` and the YAML file of its ``--config`` give to flags of ``cls``. A word that belongs to
    no flag is the value of the flag with the name ``positional``. Raises ConfigError, one line for everything that is
    unknown, refused or of the wrong type."""
    complaints = _Complaints()
    known, stray = _own_words(argv, cls, complaints)
    try:
        namespace, extra = parser.parse_known_args(known)
    except ConfigError as error:
        complaints.add(str(error))
        complaints.settle()
        raise
    given = vars(namespace)
    flags = flags_of(cls)
    is_secret = any(name in flags and flags[name].spec.secret for name in given)
    for word in [*extra, *stray]:
        if positional in given:
            shown = "" if is_secret else f" {word!r}"  # it may be a second key
            complaints.add(f"unexpected argument{shown}: {option_of(positional)} is {given[positional]!r} already")
        given.setdefault(positional, word)
    values: Mapping[str, object] = {}
    if config_file := given.pop("config", None):
        try:
            values = read_mapping(config_file)
        except ConfigError as error:
            complaints.add(str(error))
    found = _judge(cls, values, complaints) | _judge(cls, given, complaints)
    complaints.settle()
    return found


def from_mapping(cls: type[Any], values: Mapping[str, object]) -> dict[str, Any]:
    """Field values of ``cls`` from a mapping of names to values: keyword arguments, YAML, or a parsed command line. A
    name may be a field's or a flag's, with dashes or underscores, aliases included. Raises ConfigError, one line for
    everything that is wrong."""
    complaints = _Complaints()
    found = _judge(cls, values, complaints)
    complaints.settle()
    return found


def _own_words(argv: Sequence[str], cls: type[Any], complaints: _Complaints) -> tuple[list[str], list[str]]:
    """The words of ``argv`` for flags of ``cls``, each flag spelled in full, and words that belong to none. Flags of
    other servers and unknown ones go to ``complaints`` with their words. As with argparse, a beginning that only one
    flag has stands for that flag; flags of other servers count, as their users mean those. Underscores are dashes."""
    known = _spellings(cls)
    own: list[str] = []
    stray: list[str] = []
    foreign: list[tuple[str, list[str], Refusal]] = []
    words, takes_words = own, True  # where a word that is no flag belongs, unless it is stray
    for position, word in enumerate(argv):
        if word == "--":
            stray += argv[position + 1 :]
            break
        if not _is_option(word):
            belongs = takes_words or (not words and _to_bool(word) is not None)
            (words if belongs else stray).append(word)
            continue
        name, equals, value = word.partition("=")
        option = _in_full(name.replace("_", "-"), known)
        if option in known:
            own.append(option + equals + value)
            words, takes_words = own, True
            continue
        words, takes_words = [value] if equals else [], not option.startswith(_SWITCHES)
        entry = find(option)
        if entry is None and option.startswith("--no-") and (entry := find("--" + option[5:])) is not None:
            words.append("false")
        if entry is None:
            complaints.add(_unknown(option, known))
        else:
            foreign.append((entry[0], words, entry[1]))
    for option, given, refusal in foreign:
        complaints.judge(option, given, refusal)
    return own, stray


def _spellings(cls: type[Any]) -> dict[str, str]:
    """Every option of a command line with the name of its flag."""
    known = {option: flag.name for flag in flags_of(cls).values() for option in flag.options}
    negatives = {_negative(flag): flag.name for flag in flags_of(cls).values() if flag.type is bool}
    return known | negatives | {"--config": "config", "--help": "help", "-h": "help"}


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and _convert(float, word) is None


def _in_full(name: str, known: Mapping[str, str]) -> str:
    """``name``, or the option that it is the beginning of if that can be no other."""
    if name in known or find(name) is not None or not name.startswith("--"):
        return name
    begun = [option for option in (*known, *REFUSED) if option.startswith(name) and not option.endswith("*")]
    return begun[0] if len({known.get(option, option) for option in begun}) == 1 else name


def _unknown(option: str, known: Iterable[str]) -> str:
    known = [other for other in known if not other.startswith("--no-")]
    begun = [other for other in known if other.startswith(option)]
    if len(begun) > 1 and option.startswith("--"):
        return f"{option} may be {' or '.join(begun)}: write it in full"
    return f"unknown flag {option}{did_you_mean(option, known)}; see --help"


def _judge(cls: type[Any], values: Mapping[str, object], complaints: _Complaints) -> dict[str, Any]:
    """:func:`from_mapping` that leaves what is wrong with ``complaints``."""
    flags = flags_of(cls)
    names = {option.lstrip("-").replace("-", "_"): flag for flag in flags.values() for option in flag.options}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name in names:
            try:
                found[names[name].name] = coerce(names[name], _as_text(names[name], value))
            except ConfigError as error:
                complaints.add(str(error))
        elif (entry := find(option_of(name))) is not None:
            if value is not None:
                complaints.judge(entry[0], _words(value), entry[1])
        else:
            complaints.add(f"unknown setting {key}{did_you_mean(name, names)}")
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
    import yaml  # which takes longer to import than most servers need for their flags

    try:
        with user_path(path).open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARS + 1)  # a device or a pipe may have no end
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({_first_line(error)})") from error
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"--config {path}: expected flags, found more than {_MOST_CHARS} characters")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last ones: no such day, or too deep
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
