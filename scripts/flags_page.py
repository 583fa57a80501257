"""Writes docs/use/server_arguments.md, or the file that is named, from the declarations of the flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from fenceline.config.flags import Flag, flags_of
from fenceline.config.server_args import ServerArgs

_HEADER = """\
# Server arguments

The flags of `python -m fenceline.launch_server` (the same as `fenceline serve` and `scripts/serve`), with SGLang's
names and meanings wherever SGLang has them. With underscores they are keyword arguments of `fenceline.Engine` and keys
of a YAML file (`--config FILE`); the command line wins over the file, and `--no-FLAG` takes back a switch of the file.
The model may stand alone (`fenceline serve MODEL --port 8000`), and a flag may be shortened if no other begins so.

Flags of SGLang, vLLM, Text Generation Inference or llama.cpp that are not available are refused with a remedy for each.
A flag by which no answer changes is accepted with a warning.
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [_HEADER]
    for group, flags in groupby(flags_of(ServerArgs).values(), key=lambda flag: flag.spec.group):
        parts.append(f"## {group}\n\n| flag | values | default | meaning |\n|---|---|---|---|\n")
        parts[-1] += "".join(_row(flag) for flag in flags)
    return "\n".join(parts)


def _row(flag: Flag) -> str:
    options = ", ".join(f"`{option}`" for option in flag.options)
    if flag.type is bool:
        values, default = "switch", ""
    else:
        values = ", ".join(f"`{choice}`" for choice in flag.spec.choices or ()) or flag.type.__name__
        values += " ..." if flag.many else ""
        default = "" if flag.default in (None, "") else f"`{flag.default}`"
    return f"| {options} | {values} | {default} | {_escape(flag.spec.help)} |\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def main(argv: Sequence[str]) -> None:
    """Write the page to ``argv[0]`` or to docs/use/server_arguments.md of the source tree."""
    default = Path(__file__).parents[1] / "docs" / "use" / "server_arguments.md"
    path = Path(argv[0]) if argv else default
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
