"""``--help`` of a command with more flags than a screen has lines: the usual ones, and any others that are asked for.

``--help=GROUP`` explains a group of flags, ``--help=WORD`` those with the word in their names, ``--help=all`` all, as
with ``vllm serve``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fenceline.config import ConfigError

_ALL, _GROUPS = "all", "listgroup"  # vLLM's words


class HelpAction(argparse.Action):
    """Prints the help, or the part that is asked for, and ends the process. ``usual``: the names of the flags that are
    shown if none is."""

    def __init__(self, option_strings: Sequence[str], dest: str, usual: Sequence[str], default: str) -> None:
        text = "explain a group of flags, those with WORD in their names, or all"
        super().__init__(option_strings, dest, nargs="?", default=default, metavar="WORD", help=text)
        self._usual = usual

    def __call__(self, parser: argparse.ArgumentParser, _: object, word: Any, option: str | None = None) -> None:
        print(self._short(parser) if word in (None, _GROUPS) else _part(parser, word), end="")
        parser.exit()

    def _short(self, parser: argparse.ArgumentParser) -> str:
        actions = {action.dest: action for action in _shown(parser._actions)}
        more = (
            f"--help=GROUP explains the flags of {', '.join(groups_of(parser))}; --help=WORD those with WORD in their "
            f"names; --help=all all {len(actions)}."
        )
        rows = "".join(_row(actions[name]) for name in self._usual)
        return (
            f"{parser.format_usage()}\n{parser.description} The usual flags:\n{rows}\n"
            f"{textwrap.fill(more, _columns())}\n"
        )


def groups_of(parser: argparse.ArgumentParser) -> Mapping[str, Sequence[argparse.Action]]:
    """The groups of flags by the first word of their titles, in small letters."""
    named = {str(group.title).split()[0].lower(): group._group_actions for group in parser._action_groups}
    return {name: actions for name, actions in named.items() if actions and name not in ("options", "positional")}


def first_sentence(action: argparse.Action) -> str:
    """What a flag does, without what its help says after the first sentence."""
    return str(action.help).replace("%%", "%").split(". ")[0].split(" (default:")[0].rstrip(".")


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help != argparse.SUPPRESS]


def _row(action: argparse.Action) -> str:
    text = re.split("[,;:] ", first_sentence(action))[0]
    return f"  {action.option_strings[0]:<29} {textwrap.shorten(text, _columns() - 33, placeholder=' ...')}\n"


def _columns() -> int:
    return max(60, shutil.get_terminal_size().columns)


def _part(parser: argparse.ArgumentParser, word: str) -> str:
    if word == _ALL:
        return parser.format_help()
    wanted = word.lower().strip("-").replace("_", "-")
    groups = groups_of(parser)
    actions = groups.get(wanted) or _named(_shown(parser._actions), wanted)
    if not actions:
        raise ConfigError(
            f"--help={word}: no flag has it in its name, and no group is called so; groups: {', '.join(groups)}"
        )
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(f"flags of {wanted}")
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def _named(actions: Sequence[argparse.Action], wanted: str) -> list[argparse.Action]:
    exactly = [action for action in actions if "--" + wanted in action.option_strings]
    return exactly or [action for action in actions if any(wanted in option for option in action.option_strings)]
