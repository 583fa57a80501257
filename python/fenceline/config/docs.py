"""``python -m fenceline.config.docs``: writes docs/use/server_arguments.md from the declarations of the flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from fenceline.config.flags import Flag, flags_of
from fenceline.config.refused import ANY, REFUSED, Refusal
from fenceline.config.server_args import ServerArgs

_HEADER = """\
# Server arguments

The flags of `python -m fenceline.launch_server` (the same as `fenceline serve` and `scripts/serve`). Names and
meanings are SGLang's wherever SGLang has the flag. The same names, with underscores, are keyword arguments of
`fenceline.Engine` and keys of a YAML file given with `--config FILE`; the command line wins over the file, and
`--no-FLAG` takes back a switch that the file sets. The model may stand alone (`fenceline serve MODEL --port 8000`), and
a flag may be shortened as long as no other begins so.

This page is generated: change `python/fenceline/config/server_args.py` and run `python -m fenceline.config.docs`.
"""
_REFUSED_HEADER = """\
## Flags of other servers

Flags of SGLang, vLLM, Text Generation Inference and llama.cpp that are not available here (yet); `*` stands for any
ending. A start that gives some of them is refused with one line that names them all with the answers of this table.
Values in the column "accepted" ask for what happens anyway.

| flags | answer | accepted |
|---|---|---|
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [_HEADER]
    for group, flags in groupby(flags_of(ServerArgs).values(), key=lambda flag: flag.spec.group):
        parts.append(f"## {group}\n\n| flag | values | default | meaning |\n|---|---|---|---|\n")
        parts[-1] += "".join(_row(flag) for flag in flags)
    uses: dict[Refusal, list[str]] = {}
    for option, refusal in REFUSED.items():
        uses.setdefault(refusal, []).append(f"`{option}`")
    rows = (_refused_row(", ".join(options), refusal) for refusal, options in uses.items())
    parts.append(_REFUSED_HEADER + "".join(rows))
    return "\n".join(parts)


def _row(flag: Flag) -> str:
    options = ", ".join(f"`{option}`" for option in flag.options)
    if flag.type is bool:
        values, default = "switch", "off"
    else:
        values = ", ".join(f"`{choice}`" for choice in flag.spec.choices or ()) or flag.type.__name__
        values += " ..." if flag.many else ""
        default = "" if flag.default in (None, "") else f"`{flag.default}`"
    return f"| {options} | {values} | {default} | {_escape(flag.spec.help)} |\n"


def _refused_row(options: str, refusal: Refusal) -> str:
    if refusal.hint:
        return f"| {options} | accepted with a warning, without effect: no answer changes by it | any |\n"
    if refusal.neutral == ANY:
        return f"| {options} | accepted, it asks for what happens anyway | any |\n"
    accepted = ", ".join(f"`{value}`" for value in refusal.neutral)
    return f"| {options} | {_escape(refusal.remedy)} | {accepted} |\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def main(argv: Sequence[str]) -> None:
    """Write the page to ``argv[0]`` or to docs/use/server_arguments.md of the source tree."""
    default = Path(__file__).parents[3] / "docs" / "use" / "server_arguments.md"
    path = Path(argv[0]) if argv else default
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
