"""Sends hostile grammars from a seed: JSON schemas, regular expressions, EBNF, structural tags, lists of tools.

It checks that there is no 5xx; that a refusal states its reason; that a 200 that ended by itself follows the grammar,
as far as a parser can tell; and that another client's stream and /health go on. Some grammars compile until the time
limit, and one in a few hundred would take hours or all memory. A request depends only on the seed and its index
(``--replay SEED INDEX``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacked import AttackedServer
from attacks import run_apart
from beside import MARK_MS, Observer, Sample, not_run, usual, worst
from fuzz import SETTLED_S, memory_of_processes
from wire import Answer, exchange, outcome, post

ALONE_S = 3.0  # how long the other client is observed before the hostile ones start
BOUND_S = 300.0  # the time limit of one request, which may wait for many others
WORKERS = 24
MARK_MB = 500.0
_PROMPT = "Q: What is 12 + 30?\nA:"
_MAX_TOKENS = 24
# Shows only the names of tools, because long lists would not fit in the demo model's context.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name[:4] }} {% endfor %}"
    "{# <tool_call> #}{% for message in messages %}Q: {{ message.content }}\nA:{% endfor %}"
)

Json = Any


class Rng(random.Random):
    """``wild``: nearly everything that is made has errors. Half of the generators are not wild, because a schema with a
    single error is refused before the rest of it is checked."""

    wild = True

    def odd(self, probability: float) -> bool:
        """Whether to make an error here."""
        return self.random() < (probability if self.wild else 0.002)


# --- JSON schemas

_NAMES = [
    "a",
    "b",
    "id",
    "ünï",
    "x y",
    'q"t',
    "",
    "\\",
    "\n",
    "$ref",
    "type",
    "0",
    "a" * 300,
    "\U0001f600",
    "\ud7ff",
]
_NUMBERS = [0, 1, -1, 2, 3, 7, 20, 255, -300, 0.5, 1e-9, 1e308, 2**31, 2**53, 2**53 + 1, -(2**63), 10**30]
_PATTERNS = [
    *("^a$", "[a-z]+", "^[A-Z]{2}-[0-9]{1,3}$", r"\d{3,}", "(a|b)*c", "[^\\x00-\\x7f]", "é?", ".*", "a{0,500}", "x|"),
    *("(", "[", "a**", "(?=a)b", r"\1", r"\bword", "[z-a]", "a{5,2}", "^$", "(?i)x", '"', "\\", "a{2000}", "(a*)*b"),
]  # fmt: skip
_FORMATS = ["date", "time", "email", "uuid", "ipv6", "uri", "regex", "hostname", "nope", "json-pointer", ""]
_OTHERS: list[tuple[str, Json]] = [
    ("not", {}), ("if", {}), ("uniqueItems", True), ("contains", {}), ("dependentRequired", {"a": ["b"]}),
    ("$id", "x"), ("$anchor", "x"), ("title", 5), ("description", "d" * 2000), ("default", None), ("nullable", True),
    ("unevaluatedProperties", False), ("x-mine", {"a": []}), ("$schema", "nope"), ("examples", [1]), ("readOnly", True),
]  # fmt: skip
_KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]


def _schema(rng: Rng, depth: int) -> Json:
    if rng.odd(0.04):
        return rng.choice([True, False, None, 5, "string", [], [{}]])
    kind = rng.choice(
        ("leaf", "leaf", "leaf", "object", "object", "array", "any", "any", "one", "all", "ref")
    )
    if depth <= 0 and kind != "ref":
        kind = "leaf"
    made = _SCHEMAS[kind](rng, depth - 1)
    if rng.odd(0.08):
        name, value = rng.choice(_OTHERS)
        made[name] = value
    if rng.odd(0.05):  # add a keyword that belongs to another type
        made |= _leaf(rng, 0)
    return made


def _leaf(rng: Rng, depth: int) -> dict[str, Json]:
    low = rng.choice((-300, -7, 0, 1, 12))
    leaves: list[Callable[[], dict[str, Json]]] = [
        lambda: {"type": rng.choice(_KINDS)},
        lambda: {"type": rng.sample(_KINDS, rng.randint(1, 3))},
        lambda: {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 9, 2**40))},
        lambda: {"type": "number", rng.choice(("minimum", "exclusiveMaximum")): low + rng.choice((0, 0.5))},
        lambda: {"type": "string", "minLength": rng.choice((0, 1, 3)), "maxLength": rng.choice((3, 50, 400))},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS[:10])},
        lambda: {"type": "string", "format": rng.choice(_FORMATS[:6])},
        lambda: {"enum": rng.sample([*_NAMES, 0, 0.5, None, True, [], {"a": 1}], rng.randint(1, 5))},
        lambda: {"const": rng.choice([*_NAMES, 7, None, {"a": [1, {}]}])},
        dict,
    ]
    odd: list[Callable[[], dict[str, Json]]] = [
        lambda: {"type": rng.choice(["foo", 5, None, [], ["string", "foo"]])},
        lambda: {"type": "integer", "minimum": rng.choice(_NUMBERS), "maximum": rng.choice(_NUMBERS)},
        lambda: {"type": "integer", "multipleOf": rng.choice(_NUMBERS)},
        lambda: {
            "type": "string",
            "minLength": rng.choice((-1, 3, 200, "3")),
            "maxLength": rng.choice((0, 2, 0.5)),
        },
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"type": "string", "pattern": _regex(rng, 2)},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
        lambda: {"enum": rng.choice([[], 5, [2**60], [[[[]]]]])},
        lambda: {"type": "string", "maxLength": 5000 if rng.random() < 0.1 else 40},
        lambda: {"enum": [f"value {i}" for i in range(rng.choice((50, 800, 5000)))]},
    ]
    return rng.choice(odd if rng.odd(0.4) else leaves)()


def _object(rng: Rng, depth: int) -> dict[str, Json]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    made: dict[str, Json] = {"type": "object", "properties": {name: _schema(rng, depth) for name in names}}
    if rng.random() < 0.7:
        made["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.3:
        made["additionalProperties"] = False
    if rng.odd(0.2):
        made["additionalProperties"] = rng.choice((True, _schema(rng, 0)))
    if rng.odd(0.1):
        made[rng.choice(("minProperties", "maxProperties"))] = rng.choice((0, 1, 2, 30))
    if rng.odd(0.1):
        made["patternProperties"] = {rng.choice(_PATTERNS): _schema(rng, 0)}
    return made


def _array(rng: Rng, depth: int) -> dict[str, Json]:
    made: dict[str, Json] = {"type": "array", "items": _schema(rng, depth)}
    if rng.random() < 0.5:
        made |= {"minItems": rng.choice((0, 1)), "maxItems": rng.choice((1, 3, 100))}
    if rng.odd(0.2):
        made |= {"minItems": rng.choice((5, 40)), "maxItems": rng.choice((0, 2, "5"))}
    if rng.random() < 0.1:
        made["prefixItems"] = [_schema(rng, depth) for _ in range(rng.randint(0, 3))]
    return made


def _combined(name: str) -> Callable[[Rng, int], dict[str, Json]]:
    def make(rng: Rng, depth: int) -> dict[str, Json]:
        most = 1 if name == "allOf" else 3
        num = rng.choice((0, 2, 3)) if rng.odd(0.2) else rng.randint(1, most)
        kinds = rng.sample(_KINDS, num)  # different types, so that oneOf is unambiguous
        if name == "oneOf" and not rng.odd(0.3):
            return {name: [{"type": kind} for kind in kinds]}
        return {name: [_schema(rng, depth) for _ in kinds]}

    return make


def _ref(rng: Rng, depth: int) -> dict[str, Json]:
    odd = ("#", "#/$defs/two", "#/$defs/gone", "#/properties/a", "http://x", 5)
    return {"$ref": rng.choice(odd) if rng.odd(0.5) else "#/$defs/one"}


_SCHEMAS: dict[str, Callable[[Rng, int], dict[str, Json]]] = {
    "leaf": _leaf, "object": _object, "array": _array, "any": _combined("anyOf"), "one": _combined("oneOf"),
    "all": _combined("allOf"), "ref": _ref,
}  # fmt: skip


def _whole_schema(rng: Rng) -> Json:
    if rng.random() < 0.03:
        return _deep(rng)
    schema = _object(rng, 3) if rng.random() < 0.6 else _schema(rng, rng.randint(0, 5))
    if isinstance(schema, dict):
        schema["$defs"] = (
            {"one": _leaf(rng, 0)} if rng.odd(0.5) else {name: _schema(rng, 1) for name in ("one", "two")}
        )
    return schema


def _deep(rng: Rng) -> Json:
    """A nested or wide schema, or both; some of these take long to compile."""
    depth = rng.choice((5, 9, 20, 63, 66, 400))
    schema: Json = {"type": "string"}
    if rng.random() < 0.1:
        for _ in range(min(depth, 20)):  # doubles with each level
            schema = {
                "anyOf": [{"type": "array", "items": schema}, {"type": "object", "properties": {"a": schema}}]
            }
            if len(json.dumps(schema)) > 60_000:
                break
        return schema
    for _ in range(depth):
        schema = rng.choice((
            {"type": "array", "items": schema},
            {"type": "object", "properties": {"a": schema}, "required": ["a"]},
            {"anyOf": [schema, {"type": "null"}]},
            {"allOf": [schema]},
        ))  # fmt: skip
    return schema


# --- regular expressions, EBNF, structural tags

_ATOMS = [
    "a",
    "b",
    "é",
    "\U0001f600",
    ".",
    r"\d",
    r"\w",
    r"\s",
    "[a-c]",
    "[^x]",
    r"\.",
    " ",
    "-",
    r"\n",
    "0",
    "[0-9a-f]",
]
_BROKEN = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "*",
    "\\",
    "^",
    "$",
    "(?",
    "(?P<n",
    "{3",
    "{,}",
    r"\p{L}",
    r"\u12",
    "\0",
]


def _regex(rng: Rng, depth: int) -> str:
    parts = []
    for _ in range(rng.randint(1, 5)):
        part = rng.choice(_ATOMS)
        if rng.odd(0.04):
            part = rng.choice(_BROKEN)
        elif depth > 0 and rng.random() < 0.3:
            part = f"({rng.choice(('', '?:', '?<n>'))}{_regex(rng, depth - 1)})"
        if rng.random() < 0.3:
            part += rng.choice(("*", "+", "?", "{2}", "{1,4}", "{0,30}", "{3,}", "*?"))
        parts.append(part)
    return rng.choice(("", "", "|")).join(parts)


_LARGE = [
    *("(((a{50}){50}){50}){50}", "(a|aa|aaa){0,3000}b", "((a*)*)*b" * 50, "[^a]{30000}", "(" * 3000),
    "|".join(f"{i}x" * 20 for i in range(2000)),
]


def _whole_regex(rng: Rng) -> str:
    if rng.random() < 0.01:
        return rng.choice(_LARGE)
    text = _regex(rng, 3)
    return f"^{text}$" if rng.random() < 0.3 else text


def _ebnf(rng: Rng) -> str:
    if rng.random() < 0.01:
        return rng.choice((
            'root ::= ("a" | "aa" | root root root)+ "b"', "root ::= root", "", 'root ::= "a"{100000}',
            'root ::= a "x"\na ::= b\nb ::= a', "root ::= " + "(" * 2000 + '"a"' + ")" * 2000,
            "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "{i}"' for i in range(60)) + '\nr60 ::= "z"\nroot ::= r0',
        ))  # fmt: skip
    names = ["root", "one", "two", "three"][: rng.randint(1, 4)]
    known = [*names, "gone"] if rng.odd(0.5) else names

    def body(depth: int) -> str:
        parts = []
        for _ in range(rng.randint(1, 3)):
            part = rng.choice((
                f'"{rng.choice(("a", "yes", "é", " ", "0", "", chr(92) + "n", "<", "a b"))}"',
                rng.choice(("[a-z]", "[^0-9]", "[A-Z0-9]", "[é-ü]")), rng.choice(known),
            ))  # fmt: skip
            if depth > 0 and rng.random() < 0.3:
                part = f"({body(depth - 1)})"
            parts.append(part + (rng.choice(("*", "+", "?", "{2,3}")) if rng.random() < 0.25 else ""))
        return rng.choice((" ", " | ")).join(parts)

    text = "\n".join(f"{name} ::= {body(2)}" for name in names)
    if rng.odd(0.2):
        cut = rng.randrange(len(text))
        text = text[:cut] + rng.choice(('"', "::=", "(", "\0", "#", "{")) + text[cut:]
    return text


def _tag(rng: Rng, depth: int) -> Json:
    kind = rng.choice(("const_string", "regex", "json_schema", "any_text", "tag", "sequence", "or", "triggered_tags",
        "tags_with_separator", "grammar", "nope" if rng.odd(0.5) else "regex"))  # fmt: skip
    if depth <= 0 and kind in ("tag", "sequence", "or", "triggered_tags", "tags_with_separator"):
        kind = "const_string"
    tags = [
        {"type": "tag", "begin": rng.choice(("<a>", "<b>", "", "é")), "content": _tag(rng, depth - 1),
         "end": rng.choice(("</a>", "\n", ""))}
        for _ in range(rng.randint(0, 3) if depth > 0 else 0)
    ]  # fmt: skip
    return {"type": kind} | {
        "const_string": lambda: {"value": rng.choice(("yes", "", "é\n"))},
        "regex": lambda: {"pattern": _regex(rng, 2)},
        "json_schema": lambda: {"json_schema": _whole_schema(rng)},
        "any_text": lambda: {"excludes": ["<"]} if rng.random() < 0.3 else {},
        "tag": lambda: {"begin": "<a>", "content": _tag(rng, depth - 1), "end": "</a>"},
        "sequence": lambda: {"elements": [_tag(rng, depth - 1) for _ in range(rng.randint(0, 3))]},
        "or": lambda: {"elements": [_tag(rng, depth - 1) for _ in range(rng.randint(0, 3))]},
        "triggered_tags": lambda: {"triggers": rng.choice((["<"], [], ["<a", "<b"], [""])), "tags": tags,
            "at_least_one": rng.random() < 0.5, "stop_after_first": rng.random() < 0.5},
        "tags_with_separator": lambda: {"separator": rng.choice((",", "", "\n")), "tags": tags},
        "grammar": lambda: {"grammar": _ebnf(rng)},
        "nope": dict,
    }[kind]()  # fmt: skip


def _whole_tag(rng: Rng) -> Json:
    return {"type": "structural_tag", "format": _tag(rng, 3)}


def _tools(rng: Rng) -> dict[str, Json]:
    some = ("now", "weather", "a.b", "x" * 128, "move", "f-1") + (
        ("two words", "é", "") if rng.odd(0.5) else ()
    )
    names = [rng.choice(some) for _ in range(rng.randint(1, 4))]
    tools: list[Json] = []
    for name in names * (rng.choice((1, 1, 1, 40))):
        function: dict[str, Json] = {"name": name if len(names) < 2 else f"{name[:60]}{len(tools)}"}
        if rng.random() < 0.8:
            function["parameters"] = _object(rng, 2) if rng.random() < 0.8 else _whole_schema(rng)
        if rng.random() < 0.3:
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    if rng.odd(0.06):
        tools.append(rng.choice(({}, {"type": "web_search"}, {"type": "function"}, 5)))
    named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    choice = rng.choice(("required", "required", "auto", "none", named, named))
    if rng.odd(0.1):
        choice = rng.choice(
            ("sometimes", {"type": "function"}, 5, [], {"type": "function", "function": {"name": "gone"}})
        )
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": rng.random() < 0.5}


# --- one request from a seed


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``kind`` is that of its grammar; ``path`` and ``data`` are sent."""

    kind: str
    path: str
    body: dict[str, Json]

    @property
    def data(self) -> bytes:
        """The request's bytes. Halves of surrogate pairs and numbers of any size are written as in JSON."""
        return post(self.path, json.dumps(self.body).encode())


def asked(seed: int, index: int) -> Asked:
    """Request ``index`` of ``seed``."""
    rng = Rng(f"{seed}/{index}")
    rng.wild = rng.random() < 0.5
    kind = rng.choices(("json_schema", "regex", "ebnf", "structural_tag", "tools"), (40, 15, 15, 10, 20))[0]
    common = {"temperature": rng.choice((0.0, 1.0)), "seed": index}
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": _MAX_TOKENS,
    } | common
    if kind == "tools":
        return Asked(kind, "/v1/chat/completions", chat | _tools(rng))
    makers: dict[str, Callable[[Rng], Json]] = {
        "json_schema": _whole_schema, "regex": _whole_regex, "ebnf": _ebnf, "structural_tag": _whole_tag
    }  # fmt: skip
    value = makers[kind](rng)
    form = {
        "json_schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}
        },
        "structural_tag": {"response_format": value},
    }.get(kind, {kind: value})
    if rng.random() < 0.4:
        text = value if isinstance(value, str) or rng.random() < 0.5 else json.dumps(value)
        params = {"max_new_tokens": _MAX_TOKENS, "temperature": common["temperature"], kind: text}
        return Asked(kind, "/generate", {"text": _PROMPT, "sampling_params": params})
    if rng.random() < 0.5:
        return Asked(kind, "/v1/chat/completions", chat | form)
    plain = {"model": "demo", "prompt": _PROMPT, "max_tokens": _MAX_TOKENS} | common
    return Asked(kind, "/v1/completions", plain | form)


def complaint(ask: Asked, answer: Answer | str) -> str | None:
    """What is wrong with the answer; None if nothing is. A 503 is left to the caller, which reports it."""
    if isinstance(answer, str):
        return answer
    if answer.status not in (200, 400, 503):
        return f"status {answer.status}: {bytes(answer.body[:300])!r}"
    try:
        value = answer.json()
    except ValueError:
        return f"{answer.status} with a body that is no JSON: {bytes(answer.body[:300])!r}"
    if answer.status != 200:
        reason = str(value.get("error", {}).get("message", "")).strip() if isinstance(value, dict) else ""
        without = not reason or reason.endswith(":") or "gives no reason" in reason
        return f"refused without a reason: {bytes(answer.body[:300])!r}" if without else None
    text, ended = _written(value)
    if ask.kind == "json_schema" and ended:
        try:
            json.loads(text)
        except ValueError:
            return f"an answer that ended by itself is no JSON: {text[:300]!r}"
    return None


def _written(value: dict[str, Json]) -> tuple[str, bool]:
    """The text of an answer, and whether its grammar ended it."""
    if "text" in value:
        return value["text"], value["meta_info"]["finish_reason"]["type"] == "stop"
    choice = value["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text or "", choice["finish_reason"] == "stop"


# --- the run


async def _drive(port: int, args: argparse.Namespace, statuses: Counter[str], failures: list[str]) -> None:
    indices, start = iter(range(args.num)), time.monotonic()

    async def work() -> None:
        for index in indices:
            ask = asked(args.seed, index)
            begin = time.monotonic()
            answer = await exchange(port, ask.data, BOUND_S)
            took = time.monotonic() - begin
            statuses[f"{ask.kind} {outcome(answer)}"] += 1
            wrong = complaint(ask, answer)
            if wrong is None and not isinstance(answer, str) and answer.status == 503:
                wrong = f"503: {bytes(answer.body[:300])!r}"
            if wrong is not None:
                failures.append(f"--replay {args.seed} {index}: {ask.kind} after {took:.1f} s: {wrong}")
                if len(failures) <= 50:
                    print(f"FAILURE {failures[-1]}", flush=True)
            if index % 1000 == 999:
                print(f"{index + 1} requests, {time.monotonic() - start:.0f} s", flush=True)

    await asyncio.gather(*(work() for _ in range(WORKERS)))


def _driven(port: int, args: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    statuses: Counter[str] = Counter()
    failures: list[str] = []
    asyncio.run(_drive(port, args, statuses, failures))
    return statuses, failures


def run_grammars(args: argparse.Namespace) -> int:
    """Run it; returns 1 if anything failed or missed the mark."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE)
        flags = ["--chat-template", str(template), "--tool-call-parser", "qwen25", *args.flags]
        with AttackedServer(args.python_path, flags) as server:
            server.wait_ready()
            if args.replay:
                return _replay(server, *args.replay)
            warm = Asked(
                "regex", "/generate", {"text": "Q:", "sampling_params": {"regex": "a", "max_new_tokens": 1}}
            )
            asyncio.run(
                exchange(server.port, warm.data, BOUND_S)
            )  # the compiler's process starts with the first
            server.fill_cache()
            sizes = memory_of_processes(server.pid)
            with Observer(server.port, server.pid) as observer:
                time.sleep(ALONE_S)
                begin = time.monotonic()
                statuses, failures = run_apart(_driven, server.port, args)
                end = time.monotonic()
                time.sleep(SETTLED_S)
                seen = observer.look()
            if server.alive:
                _show_growth(sizes, memory_of_processes(server.pid))
            else:
                failures.append("the server has ended")
            log = server.log_text()
    if "Traceback" in log:
        failures.append("a traceback in the server's log:\n" + log[log.index("Traceback") :][:3000])
    failures += [f"the neighbour: {what}" for when, what in seen.failures if when >= begin]
    if len({sample.took for sample in seen.texts}) > 1:
        failures.append("the neighbour's text changed")
    for status, count in sorted(statuses.items()):
        print(f"{count:>7}  {status}")
    gaps = sorted(sample.took for sample in seen.next_tokens if begin <= sample.start + sample.took <= end)
    health = 1e3 * max(worst(seen.health, begin), worst(seen.kept, begin))
    memory = [(sample.start, sample.took / 1e6) for sample in seen.memory]
    before = max((size for when, size in memory if when < begin), default=0.0)
    grown = memory[-1][1] - before
    print(
        f"{args.num} requests in {end - begin:.0f} s; {sum(n for s, n in statuses.items() if ' 5' in s)} 5xx;"
        f" {len(failures)} failures\n"
        f"worst /health silence {health:.0f} ms (usual {1e3 * usual(seen.health, begin):.1f})\n"
        f"neighbour's stream: worst gap {_ms(gaps, 1.0)} ms, 99.9% {_ms(gaps, 0.999)}, 99% {_ms(gaps, 0.99)}, median"
        f" {_ms(gaps, 0.5)} of {len(gaps)}, alone {1e3 * usual(seen.next_tokens, begin):.1f}; worst first token"
        f" {1e3 * worst(seen.first_tokens, begin):.0f} ms; the observer itself late"
        f" {1e3 * worst(seen.lag, begin):.0f} ms\n"
        f"memory of all processes {before:.0f} MB, peak +{max(size for _, size in memory) - before:.0f} MB, at the end"
        f" {grown:+.0f} MB",
        flush=True,
    )
    late = _late(seen.next_tokens, begin, MARK_MS / 1e3)
    own = [gap for gap in late if gap.took - not_run(seen.lag, gap) > MARK_MS / 1e3]
    for what, found in (
        (f"gaps above {MARK_MS:g} ms", late),
        ("of them also without the time in which the observer did not run", own),
    ):
        if late:
            print(f"{len(found)} {what}, at seconds {[round(gap.start - begin, 1) for gap in found[:30]]}")
    missed = health > MARK_MS or bool(late) or grown > MARK_MB
    print("missed the mark" if missed else "within the mark", f"of {MARK_MS:g} ms and {MARK_MB:g} MB")
    return 1 if failures or missed else 0


def _show_growth(before: list[int], after: list[int]) -> None:
    """Print how many megabytes each process has gained. One that has begun since then, for large bodies, has gained
    all that it has."""
    before = [*before, *[0] * (len(after) - len(before))]
    grown = [round((now - then) / 1e6) for then, now in zip(before, after, strict=True)]
    print(f"memory gained, MB: main {grown[0]}, its children as they were started {grown[1:]}")


def _ms(ordered: list[float], share: float) -> str:
    return f"{1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]:.1f}" if ordered else "-"


def _late(samples: Any, since: float, most: float) -> list[Sample]:
    return [one for one in samples if one.start >= since and one.took > most]


def _replay(server: AttackedServer, seed: int, index: int) -> int:
    ask = asked(seed, index)
    print(json.dumps(ask.body, ensure_ascii=False)[:4000])
    begin = time.monotonic()
    answer = asyncio.run(exchange(server.port, ask.data, BOUND_S))
    shown = "" if isinstance(answer, str) else bytes(answer.body)[:2000].decode(errors="replace")
    print(f"{outcome(answer)} after {time.monotonic() - begin:.2f} s {shown}\n{server.log_text()[-2000:]}")
    wrong = complaint(ask, answer)
    print(f"FAILURE {wrong}" if wrong else "nothing wrong")
    return 1 if wrong else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``grammars``."""
    parser.add_argument("--num", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--replay", type=int, nargs=2, metavar=("SEED", "INDEX"), help="send this one request"
    )
    parser.add_argument("--python-path", type=Path, default=Path(__file__).parents[2] / "python")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of the server, last")
    parser.set_defaults(run=run_grammars)
