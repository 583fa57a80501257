"""From a command line (and a YAML file) to the flags of a dataclass; every complaint is one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fenceline.config.errors import ConfigError
from fenceline.config.flags import Flag, coerce, did_you_mean, flags_of
from fenceline.config.refused import ELSEWHERE, Refusal, complaints
from fenceline.config.yaml_file import read_mapping


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing the usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def build_parser(
    cls: type[Any], prog: str, description: str, refused: Mapping[str, Refusal]
) -> argparse.ArgumentParser:
    """A parser for the flags of ``cls``; values stay text, ``coerce`` judges them later."""
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
    """Field values from names to values: keyword arguments, a YAML mapping, a parsed command line.

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
    """A mapping given to a flag that takes JSON text, as that text; any other value as it is."""
    return json.dumps(value) if flag.spec.metavar == "JSON" and isinstance(value, dict) else value


def _words(value: object) -> list[str]:
    if value is True:
        return []
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return ["false"] if value is False else [str(value)]
