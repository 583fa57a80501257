"""Writes docs/use/server_arguments.md and docs/use/from_vllm_or_sglang.md, or into the folder that is named, from the
declarations of the flags and from the answers to those of other servers."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from fenceline.config.flags import Flag, flags_of
from fenceline.config.refused import REFUSED
from fenceline.config.server_args import ServerArgs

_HEADER = """\
# Server arguments

The flags of `fenceline serve` (the same as `python -m fenceline.launch_server` and `scripts/serve`), with SGLang's
names and meanings; defaults in **bold**. With underscores they are keyword arguments of `fenceline.Engine` and keys of
a YAML file (`--config FILE`); the command line wins over the file, and `--no-FLAG` takes back a switch of the file. The
model may stand alone (`fenceline serve MODEL`), and a flag may be shortened if no other begins so. Flags of [other
servers](from_vllm_or_sglang.md) that are missing are refused with a remedy, or accepted with a warning if no answer
depends on them.
"""


_SIDE_BY_SIDE = """\
# From vLLM or SGLang

`vllm serve MODEL` becomes `fenceline serve MODEL`, `python -m sglang.launch_server` becomes
`python -m fenceline.launch_server`; the port is 30000 unless `--port` is given (vLLM's: 8000). SGLang's flags keep
their names and meanings ([all flags](server_arguments.md)), and so do many of vLLM's; a start names in one
line all others that must change, with what to write instead, and warns of those without effect. Clients need a new
address only: OpenAI's, Anthropic's and SGLang's endpoints are [served](api.md).

Flags with another name here:

| there | here |
|---|---|
"""


def render() -> str:
    """The page of our flags as Markdown."""
    parts = [_HEADER]
    for group, flags in groupby(flags_of(ServerArgs).values(), key=lambda flag: flag.spec.group):
        parts.append(f"## {group}\n\n| flag | values | meaning |\n|---|---|---|\n")
        parts[-1] += "".join(_row(flag) for flag in flags)
    return "\n".join(parts)


def render_side_by_side() -> str:
    """The page of other servers' flags as Markdown."""
    by_remedy: dict[str, list[str]] = {}
    for option, refusal in REFUSED.items():
        if refusal.remedy.startswith("use "):
            by_remedy.setdefault(refusal.remedy.removeprefix("use "), []).append(f"`{option}`")
    rows = []
    for remedy, options in by_remedy.items():
        here = re.sub("--[a-z-]+", "`\\g<0>`", remedy)
        rows.append(f"| {' '.join(options)} | {here} |\n")
    return _SIDE_BY_SIDE + "".join(rows)


def _row(flag: Flag) -> str:
    options = ", ".join(f"`{option}`" for option in flag.options)
    default = None if flag.default in (None, "") else str(flag.default)
    if flag.type is bool:
        values = "switch"
    elif flag.spec.choices:
        values = ", ".join(f"**`{c}`**" if str(c) == default else f"`{c}`" for c in flag.spec.choices)
    else:
        values = flag.type.__name__ + (" ..." if flag.many else "") + (f", **`{default}`**" if default else "")
    return f"| {options} | {values} | {_escape(flag.spec.help)} |\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def main(argv: Sequence[str]) -> None:
    """Write the pages into the folder ``argv[0]`` or into docs/use of the source tree."""
    folder = Path(argv[0]) if argv else Path(__file__).parents[1] / "docs" / "use"
    for name, page in (("server_arguments", render()), ("from_vllm_or_sglang", render_side_by_side())):
        path = folder / f"{name}.md"
        path.write_text(page, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
