"""Runs misbehaving clients against a server with the demo model, and measures how each affects well-behaved clients.

    python benchmark/hostile/hostile.py attacks                             # every attack, this tree
    python benchmark/hostile/hostile.py attacks --only "tokenize;header"
    python benchmark/hostile/hostile.py attacks --python-path OLD/python NEW/python --output both.jsonl
    python benchmark/hostile/hostile.py attacks --resume --output new.jsonl    # those that are not in this file yet
    python benchmark/hostile/hostile.py table both.jsonl                    # Markdown, the trees side by side
    python benchmark/hostile/hostile.py table --outside new.jsonl           # those that miss the mark

Each attack gets a new server, so that memory is not attributed to the wrong attack. Several servers are started
together, because starting takes longer than most attacks, and the KV cache of each is written once, so that it does not
count as growth. Then they are attacked one after the other, while the others are idle. With several trees, each attack
is made on all trees before the next attack. Everything goes to 127.0.0.1, is limited, and ends by itself. The mark for
2 cores: /health within 100 ms, tokens at most 100 ms late, memory back to within 100 MB five seconds later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from attacked import AttackedServer, keep_cores_for_servers
from attacks import ATTACKS, Attack, Target, leave_cores_to_the_server
from beside import MARK_MS, PATIENCE_S, Observed, Observer, usual, worst

TREE = Path(__file__).parents[2] / "python"
BEFORE_S = 3.0  # how long the well-behaved clients run before the attack
AFTER_S = 5.0  # after the attack; memory that is still used then counts as kept
MARK_MB = 100.0


@dataclass(frozen=True, slots=True)
class Row:
    """The effect of one attack on one tree. Times are the worst ones, in milliseconds; memory is the growth of all the
    server's processes in MB (10^6 bytes)."""

    attack: str
    tree: str
    outcomes: dict[str, int]
    took_s: float
    health_ms: float
    kept_health_ms: float
    token_late_ms: float
    memory_peak_mb: float
    memory_kept_mb: float
    log_kb: float
    tracebacks: int
    failures: list[str]
    serves: bool
    usual_health_ms: float
    usual_token_ms: float
    observer_lag_ms: float


def attack_process(pipe: Connection, name: str, port: int) -> None:
    """Build the payload and report it, attack when told to, and send the outcomes."""
    leave_cores_to_the_server()
    attack = ATTACKS[name]
    run = attack.make()
    pipe.send(None)
    pipe.recv()
    target = Target(port)

    async def bounded() -> None:
        try:
            async with asyncio.timeout(attack.limit_s):
                await run(target)
        except TimeoutError:
            target.outcomes["cut off"] += 1
        except OSError as error:
            target.outcomes[type(error).__name__] += 1

    asyncio.run(bounded())
    pipe.send(dict(target.outcomes))


class Attacker:
    """The process of one attack. It begins to build its payload with the ``with`` block."""

    def __init__(self, name: str, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._limit_s = ATTACKS[name].limit_s
        self._process = context.Process(target=attack_process, args=(there, name, port), daemon=True)

    def __enter__(self) -> Attacker:
        self._process.start()
        return self

    def wait_ready(self) -> None:
        """Wait until the payload has been built."""
        self._here.recv()

    def run(self) -> dict[str, int]:
        """Attack and wait for the end. Returns the outcomes with their counts."""
        self._here.send(None)
        try:
            if self._here.poll(self._limit_s + 30):
                outcomes: dict[str, int] = self._here.recv()
                return outcomes
        except EOFError:
            return {"attacker died": 1}
        return {"attacker hung": 1}

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


class Site:
    """A server and the attacker that will attack it, both being started when the ``with`` block begins."""

    def __init__(self, attack: Attack, tree: Path, label: str, flags: Sequence[str]) -> None:
        self.attack = attack
        self.label = label
        self._server = AttackedServer(tree, [*flags, *attack.flags], attack.nofile)
        self._attacker = Attacker(attack.name, self._server.port)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Site:
        self._stack.enter_context(self._server)
        self._stack.enter_context(self._attacker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_ready(self) -> None:
        """Wait until the attack can begin."""
        self._server.wait_ready()
        self._server.fill_cache()
        self._attacker.wait_ready()

    def measure(self) -> Row:
        """Attack and measure. Afterwards both processes have ended."""
        server = self._server
        with self._stack, Observer(server.port, server.pid) as observer:
            time.sleep(BEFORE_S)
            log_bytes = server.log.stat().st_size
            begin = time.monotonic()
            outcomes = self._attacker.run()
            end = time.monotonic()
            time.sleep(AFTER_S)
            seen = observer.look()
            serves = _serves_again(server, observer, end)
            if serves and (late := observer.look()).health and time.monotonic() - end > 2 * AFTER_S:
                seen = late  # it was blocked for longer than the first look showed
            log = server.log_text()
            new_log_bytes, tracebacks = len(log) - log_bytes, log.count("Traceback")
            span = begin, end
            return _row(self.attack, self.label, seen, outcomes, span, new_log_bytes, tracebacks, serves)


def _serves_again(server: AttackedServer, observer: Observer, since: float) -> bool:
    """Whether a whole stream that began after ``since`` arrives within some time."""
    deadline = time.monotonic() + PATIENCE_S
    while server.alive and time.monotonic() < deadline:
        if any(sample.start > since for sample in observer.look().texts):
            return True
        time.sleep(0.5)
    return False


def _row(
    attack: Attack,
    label: str,
    seen: Observed,
    outcomes: dict[str, int],
    span: tuple[float, float],
    log_bytes: int,
    tracebacks: int,
    serves: bool,
) -> Row:
    begin, end = span
    failures = sorted({what for when, what in seen.failures if when >= begin})
    if len({sample.took for sample in seen.texts}) > 1:
        failures.append("the stream's text changed")
    first, following = usual(seen.first_tokens, begin), usual(seen.next_tokens, begin)
    late = max(worst(seen.first_tokens, begin, first), worst(seen.next_tokens, begin, following))
    before = max((m.took for m in seen.memory if begin - 1 <= m.start < begin), default=0.0)
    peak = max((m.took for m in seen.memory if m.start >= begin), default=before)
    kept = [m.took for m in seen.memory if m.start >= end + AFTER_S - 0.5]
    return Row(
        attack=attack.name,
        tree=label,
        outcomes=outcomes,
        took_s=round(end - begin, 2),
        health_ms=round(1e3 * worst(seen.health, begin), 1),
        kept_health_ms=round(1e3 * worst(seen.kept, begin), 1),
        token_late_ms=round(1e3 * late, 1),
        memory_peak_mb=round((peak - before) / 1e6, 1),
        memory_kept_mb=round(((kept or [before])[0] - before) / 1e6, 1),
        log_kb=round(log_bytes / 1e3, 1),
        tracebacks=tracebacks,
        failures=failures[:5],
        serves=serves,
        usual_health_ms=round(1e3 * usual(seen.health, begin), 2),
        usual_token_ms=round(1e3 * following, 2),
        observer_lag_ms=round(1e3 * worst(seen.lag, begin), 1),
    )


def misses(row: Row) -> list[str]:
    """The figures that miss the mark."""
    found = []
    if max(row.health_ms, row.kept_health_ms) > MARK_MS:
        found.append("health")
    if row.token_late_ms > MARK_MS:
        found.append("tokens")
    if row.memory_kept_mb > MARK_MB:
        found.append("memory")
    if not row.serves:
        found.append("dead")
    if row.tracebacks:
        found.append("traceback")
    if any(status.startswith("5") and status != "503" for status in row.outcomes):
        found.append("5xx")
    if row.failures:
        found.append("neighbour failed")
    return found


def print_row(row: Row) -> None:
    """Print one line."""
    got = ", ".join(f"{count} x {status}" for status, count in sorted(row.outcomes.items()))
    print(
        f"{row.attack[:56]:<56} {row.tree[:8]:<8} {row.took_s:>6.1f} s  health {row.health_ms:>7.0f}"
        f" kept {row.kept_health_ms:>7.0f}  token +{row.token_late_ms:>6.0f} ms  peak {row.memory_peak_mb:>6.0f}"
        f" kept {row.memory_kept_mb:>6.0f} MB"
        f"  observer late {row.observer_lag_ms:>4.0f} ms  log {row.log_kb:>6.0f} KB  {got}  {' '.join(misses(row))}",
        flush=True,
    )
    for failure in row.failures:
        print(f"    {failure}", flush=True)


def run_attacks(args: argparse.Namespace) -> int:
    """Run the attacks, each on all trees. Returns 1 if the last tree missed the mark."""
    wanted = [part.strip() for part in args.only.split(";")] if args.only else [""]
    chosen = [attack for name, attack in ATTACKS.items() if any(part in name for part in wanted)]
    if not chosen:
        raise SystemExit(f"no attack has {args.only!r} in its name; --list shows them all")
    if args.list:
        print("\n".join(attack.name for attack in chosen))
        return 0
    trees = [Path(path).resolve() for path in args.python_path]
    labels = args.label or (["before", "after"] if len(trees) == 2 else [str(i) for i in range(len(trees))])
    if args.resume and args.output is None:
        raise SystemExit("--resume needs the --output that it goes on with")
    done = read_rows(args.output) if args.resume and args.output.exists() else []
    known = {(row.attack, row.tree) for row in done}
    plan = [
        (attack, tree, label)
        for attack in chosen
        for tree, label in zip(trees, labels, strict=True)
        if (attack.name, label) not in known
    ]
    rows: list[Row] = []
    with args.output.open("a") if args.output else contextlib.nullcontext() as file:
        for start in range(0, len(plan), args.ahead):
            with contextlib.ExitStack() as stack:
                sites = [
                    stack.enter_context(Site(attack, tree, label, args.flags))
                    for attack, tree, label in plan[start : start + args.ahead]
                ]
                for site in sites:
                    site.wait_ready()
                for site in sites:
                    rows.append(site.measure())
                    print_row(rows[-1])
                    if file is not None:
                        print(json.dumps(asdict(rows[-1])), file=file, flush=True)
    last = [row for row in rows if row.tree == labels[-1]]
    missed = [row for row in last if misses(row)]
    print(f"{len(missed)} of {len(last)} attacks missed the mark in the last tree; {len(known)} were known")
    return 1 if missed else 0


def read_rows(file: Path) -> list[Row]:
    """The measurements in a file of --output."""
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()]


def print_table(args: argparse.Namespace) -> int:
    """Print Markdown: a row for each attack, with the trees side by side."""
    rows: dict[str, dict[str, Row]] = {}
    for row in read_rows(args.file):
        rows.setdefault(row.attack, {})[row.tree] = row
    if args.outside:
        rows = {name: of for name, of in rows.items() if name.startswith("nothing") or any(map(misses, of.values()))}
    labels = list(dict.fromkeys(label for of in rows.values() for label in of))
    columns = ("/health ms", "token late ms", "memory peak / kept MB", "answers")
    heading = ["attack", *(f"{column}, {label}" for column in columns for label in labels)]
    print("| " + " | ".join(heading) + " |")
    print("|" + "---|" * len(heading))
    for name, of in rows.items():
        cells = [name]
        for show in (_health_cell, _token_cell, _memory_cell, _answers_cell):
            cells += [show(of[label]) if label in of else "" for label in labels]
        print("| " + " | ".join(cells) + " |")
    return 0


def _health_cell(row: Row) -> str:
    return f"{max(row.health_ms, row.kept_health_ms):,.0f}" if row.serves else "never"


def _token_cell(row: Row) -> str:
    return f"{row.token_late_ms:,.0f}" if row.serves else "never"


def _memory_cell(row: Row) -> str:
    return f"{row.memory_peak_mb:,.0f} / {row.memory_kept_mb:,.0f}"


def _answers_cell(row: Row) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(row.outcomes.items()))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    attacks = commands.add_parser("attacks", help="each attack on a server of its own, measured from beside")
    attacks.add_argument("--only", help="attacks whose names contain one of these words, separated by semicolons")
    attacks.add_argument("--list", action="store_true", help="show the attacks' names and stop")
    attacks.add_argument("--python-path", nargs="+", default=[TREE], help="folders with the package fenceline")
    attacks.add_argument("--label", nargs="+", help="names of these trees; before and after for two")
    attacks.add_argument("--output", type=Path, help="append a JSON line for each measurement")
    attacks.add_argument(
        "--resume", action="store_true", help="leave out what --output has already, to go on after a break"
    )
    attacks.add_argument("--ahead", type=int, default=4, help="servers that are started together (default 4)")
    attacks.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of the server, last")
    attacks.set_defaults(run=run_attacks)
    table = commands.add_parser("table", help="the measurements of --output as a Markdown table")
    table.add_argument("file", type=Path)
    table.add_argument("--outside", action="store_true", help="only what is outside the mark, and nothing's lines")
    table.set_defaults(run=print_table)
    for command in commands.choices.values():
        command.add_argument(
            "--server-cores",
            type=int,
            help="cores that only servers use, while clients use the others (default: they share all)",
        )
    args = parser.parse_args()
    if args.server_cores is not None:
        keep_cores_for_servers(args.server_cores)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
