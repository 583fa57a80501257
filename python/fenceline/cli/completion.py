"""Scripts by which bash, zsh and fish complete a command line, made from the parsers of the commands.

A script has everything in it: completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fenceline.config.help import HelpAction, first_sentence, groups_of

Commands = Mapping[str, tuple[str, argparse.ArgumentParser]]
"""What each command does, and its flags."""


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag with all its spellings. If a word follows it, that is one of ``values``, or anything where there are
    none."""

    options: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Command:
    """A command with its flags, and the words that may stand without one."""

    name: str
    help: str
    flags: tuple[_Flag, ...]
    words: tuple[str, ...]


def script(shell: str, commands: Commands) -> str:
    """The script for ``shell``: bash, zsh or fish."""
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return "\n".join(write([_command(name, help, parser) for name, (help, parser) in commands.items()])) + "\n"


def _command(name: str, help: str, parser: argparse.ArgumentParser) -> _Command:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = tuple(_flag(parser, action) for action in shown if action.option_strings)
    words = tuple(value for action in shown if not action.option_strings for value in _values(action))
    return _Command(name, help, flags, words)


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> _Flag:
    values = ("all", *groups_of(parser)) if isinstance(action, HelpAction) else _values(action)
    return _Flag(tuple(action.option_strings), first_sentence(action), action.nargs != 0, values)


def _values(action: argparse.Action) -> tuple[str, ...]:
    """The choices, which flags of the server have in their metavar alone: {auto,cpu,cuda}."""
    shown = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices is None and shown.startswith("{"):
        return tuple(shown[1:-1].split(","))
    return tuple(str(choice) for choice in action.choices or ())


def _bash(commands: list[_Command]) -> Iterator[str]:
    yield """\
# Completion of fenceline for bash: source <(fenceline completion bash)
_fenceline() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=
    if [[ $cur == = ]]; then cur=; elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then"""
    yield f'        words="{" ".join(command.name for command in commands)} --help --version"'
    yield "    else"
    yield '        case "${COMP_WORDS[1]} $prev" in'
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                pattern = " | ".join(f'"{command.name} {option}"' for option in flag.options)
                # Without words bash completes the names of files.
                yield f'            {pattern}) words="{" ".join(flag.values)}" ;;'
        options = " ".join(option for flag in command.flags for option in flag.options)
        words = f'if [[ $cur == -* ]]; then words="{options}"; else words="{" ".join(command.words)}"; fi'
        yield f'            "{command.name} "*) {words} ;;'
    yield """\
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _fenceline fenceline"""


def _zsh(commands: list[_Command]) -> Iterator[str]:
    yield """\
#compdef fenceline
# Completion of fenceline for zsh: source <(fenceline completion zsh), after compinit
_fenceline() {
    local -a commands
    commands=("""
    yield from (f"        {_quoted(f'{command.name}:{command.help}')}" for command in commands)
    yield """\
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in"""
    for command in commands:
        yield f"        {command.name})"
        yield "            _arguments \\"
        for flag in command.flags:
            text = flag.help
            for sign in "\\[]:":
                text = text.replace(sign, "\\" + sign)
            values = f"({' '.join(flag.values)})" if flag.values else "_files"
            for option in flag.options:
                joined = "=" if option.startswith("--") else ""
                value = f"{joined}[{text}]:value:{values}" if flag.takes_value else f"[{text}]"
                yield f"                {_quoted(f'*{option}{value}')} \\"
        words = f"{{compadd -- {' '.join(command.words)}; _files}}" if command.words else "_files"
        yield f"                {_quoted(f'*:argument:{words}')} ;;"
    yield """\
    esac
}
if [[ $funcstack[1] == _fenceline ]]; then _fenceline "$@"; else compdef _fenceline fenceline; fi"""


def _fish(commands: list[_Command]) -> Iterator[str]:
    yield """\
# Completion of fenceline for fish: fenceline completion fish | source
function __fenceline_runs
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end"""
    for command in commands:
        yield f"complete -c fenceline -f -n __fenceline_runs -a {command.name} -d {_quoted(command.help)}"
    for command in commands:
        begin = f"complete -c fenceline -n '__fenceline_runs {command.name}'"
        if command.words:
            yield f"{begin} -a '{' '.join(command.words)}'"
        for flag in command.flags:
            names = " ".join(
                f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}" for option in flag.options
            )
            value = f" -x -a '{' '.join(flag.values)}'" if flag.values else " -r" if flag.takes_value else ""
            yield f"{begin} {names}{value} -d {_quoted(flag.help)}"


def _quoted(text: str) -> str:
    """``text`` in single quotes for zsh and fish."""
    return "'" + text.replace("'", "'\\''") + "'"
