"""--tool-call-parser: each format's calls, whole and cut anywhere, and what only looks like a call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.config.flags import flags_of
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.openai.tool_call_parser import (
    JSON_CALLS,
    TOOL_CALL_FORMATS,
    Arguments,
    CallBegun,
    Content,
    Found,
    ToolCallParser,
    tool_call_format_of,
)

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "at": {"type": ["number", "null"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "fields": {"type": "array", "items": {"type": "string"}},
        },
    },
}
TOOLS = {"weather": WEATHER, "now": {"name": "now"}}
_FIRST_NAMES = {id(form): name for name, form in reversed(TOOL_CALL_FORMATS.items())}  # some have several
FORMATS = {**{name: TOOL_CALL_FORMATS[name] for name in _FIRST_NAMES.values()}, "json": JSON_CALLS}

PARIS = {"city": 'Paris "la belle"\n{}[]\\', "days": 3}
PARIS_JSON = json.dumps(PARIS)
WEATHER_JSON = json.dumps({"name": "weather", "arguments": PARIS})
NOW_JSON = '{"arguments": {}, "name": "now"}'
BOTH = [("weather", PARIS), ("now", {})]
SEP = "<｜tool▁sep｜>"

# format, output, content, calls
CASES = [
    ("qwen25", f"<tool_call>\n{WEATHER_JSON}\n</tool_call>\n<tool_call>\n{NOW_JSON}\n</tool_call>", "", BOTH),
    ("qwen25", f"I look.\n\n<tool_call>{WEATHER_JSON}</tool_call>\n", "I look.", BOTH[:1]),
    ("qwen25", f"<tool_call>\n{WEATHER_JSON}\n</tool_call>\n Done.", "Done.", BOTH[:1]),
    ("qwen25", f"<tool_call>{WEATHER_JSON}<tool_call>{NOW_JSON}", "", BOTH),  # no end tags
    ("qwen25", '<tool_call>{"name": "gone", "arguments": {"a": [1, {}]}}</tool_call>', "", [("gone", {"a": [1, {}]})]),
    ("qwen25", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("qwen25", f'<tool_call>{{"name":"weather","arguments":{json.dumps(PARIS_JSON)}}}</tool_call>', "", BOTH[:1]),
    ("hermes", f"<tool_call>{NOW_JSON}</tool_call>", "", BOTH[1:]),
    ("llama3", f'{{"name": "weather", "parameters": {PARIS_JSON}}}; {NOW_JSON}', "", BOTH),
    ("llama3", f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS_JSON}}}', "", BOTH[:1]),
    ("llama3", f"So:\n<|python_tag|>{NOW_JSON}", "So:", BOTH[1:]),
    ("mistral", f"[TOOL_CALLS] [{WEATHER_JSON}, {NOW_JSON}]", "", BOTH),
    ("mistral", f"Hm. [TOOL_CALLS]weather[ARGS]{PARIS_JSON}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", "Hm.", BOTH),
    ("mistral", f"[TOOL_CALLS]weather{PARIS_JSON}", "", BOTH[:1]),
    (
        "deepseekv3",
        "Yes.<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>function{SEP}weather\n```json\n{PARIS_JSON}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function{SEP}now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Yes.",
        BOTH,
    ),
    (
        "deepseekv31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather{SEP}{PARIS_JSON}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>now{SEP}{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        BOTH,
    ),
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n\"<b>\"\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=hourly>True</parameter>\n<parameter=at>\nNone\n</parameter>\n"
        "<parameter=note>\n7\n</parameter>\n<parameter=fields>\n[\"a\"]\n</parameter>\n<parameter=more>\n5\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Let me see.",
        [
            (
                "weather",
                {
                    "city": 'Paris\n"<b>"', "days": 3, "hourly": True, "at": None, "note": "7", "fields": ["a"],
                    "more": "5",
                },
            ),
            ("now", {}),
        ],
    ),
    ("qwen3_coder", "<function=now></function>", "", BOTH[1:]),
    (
        "seed_oss",
        "Let me see.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n"
        "</seed:tool_call>",
        "Let me see.",
        [("weather", {"city": "Paris", "days": 3}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=days>many</parameter></function></tool_call>",
        "",
        [("weather", {"days": "many"})],
    ),
    (
        "glm45",
        "Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> Paris\n</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>hourly</arg_key><arg_value>true</arg_value></tool_call>\n"
        "<tool_call>now</tool_call>",
        "Let me see.",
        [("weather", {"city": " Paris\n", "days": 3, "hourly": True}), ("now", {})],
    ),
    (
        "minimax-m2",
        'Let me see.\n<minimax:tool_call>\n<invoke name="weather"><parameter name="city"></invoke>\n</parameter>'
        '<parameter name="note">null</parameter><parameter name="days">3</parameter></invoke>\n'
        "<invoke name=now></invoke></minimax:tool_call>\nDone.",
        "Let me see.Done.",
        [("weather", {"city": "</invoke>\n", "note": None, "days": 3}), ("now", {})],
    ),
    ("granite", f"<tool_call>[{WEATHER_JSON}, {NOW_JSON}]</tool_call>", "", BOTH),
    ("granite", f"Hm. <tool_call>{WEATHER_JSON}</tool_call>\n<tool_call> [{NOW_JSON}] \n</tool_call>\n So.", "Hm.So.",
     BOTH),
    ("granite", f"<|tool_call|>[{NOW_JSON}]", "", BOTH[1:]),
    ("pythonic", f"[weather(city={PARIS['city']!r}, days=3), now()]", "", BOTH),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", BOTH[1:]),
    ("pythonic", "[weather(at=-1.5, fields=['(', ')]'], hourly=True, note=None)]", "", [
        ("weather", {"at": -1.5, "fields": ["(", ")]"], "hourly": True, "note": None})
    ]),
    ("olmo3", "Hm. <function_calls>\nnow()\ngone(note=[null, {'a': false}], hourly=true)\n</function_calls>\n So.",
     "Hm.So.", [("now", {}), ("gone", {"note": [None, {"a": False}], "hourly": True})]),
    ("json", f'[{{"name": "weather", "parameters": {PARIS_JSON}}}, {NOW_JSON}]', "", BOTH),
]  # fmt: skip

# Outputs that begin like a call and are none: every character is content.
PLAIN = [
    *[(name, text) for name in FORMATS for text in ("", "  Hello. \n", "a < b [1, 2] {3} <too", "\n\n")],
    ("qwen25", "Write\n <tool_call> and then the call."),
    ("qwen25", '<tool_call>{"weather": 1}</tool_call>'),
    ("qwen25", '<tool_call>{"name": "two words"}</tool_call>'),
    ("qwen25", '<tool_call>{"name": "wea'),
    ("llama3", '{"answer": 5}'),
    ("llama3", '{"name": "Anna", "parameters": 5}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("granite", "<tool_call>[5]</tool_call>"),
    ("mistral", "[1, 2]"),
    ("mistral", "[TOOL_CALLS] [5]"),
    ("deepseekv3", f"<｜tool▁call▁begin｜>x{SEP}"),
    ("qwen3_coder", "<tool_call>now</tool_call>"),
    ("glm45", "<tool_call>weather of today</tool_call>"),
    ("glm45", "Use <tool_call>now or then"),
    ("glm45", "<tool_call>now\nor then"),
    ("minimax-m2", "<minimax:tool_call> begins a call"),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="two words"></invoke>\n</minimax:tool_call>'),
    ("pythonic", "[1, now(), x]"),
    ("pythonic", "[gone()]"),
    ("pythonic", "[now(5)]"),
    ("pythonic", "[now(a=b)]"),
    ("pythonic", "[now(a={1})]"),
    ("pythonic", "[now(a=" + "[" * 500 + "]" * 500 + ")]"),
    ("olmo3", "Within <function_calls></function_calls> it calls"),
    ("olmo3", "<function_calls>now(a=nothing)</function_calls>"),
    ("json", "[5]"),
    ("qwen25", '<tool_call>{"arguments": "\\ud800", "name": "now"}</tool_call>'),
    ("pythonic", "[now(a='\\ud800')]"),
    ("pythonic", "[" + "a" * 300),
    ("mistral", "[TOOL_CALLS]" + "a" * 300 + "[ARGS]{}"),
]


def read(name: str, chunks: list[str]) -> list[Found]:
    parser = ToolCallParser(FORMATS[name], TOOLS)
    return [found for chunk in chunks for found in parser.feed(chunk)] + parser.finish()


def summary(found: list[Found]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls with the text of their arguments."""
    content, calls = "", []
    for event in found:
        match event:
            case Content(text):
                content += text
            case CallBegun(name):
                calls.append((name, ""))
            case Arguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def cuts(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize(("name", "output", "content", "calls"), CASES)
def test_calls_and_content(name: str, output: str, content: str, calls: list[tuple[str, object]]) -> None:
    text, found = summary(read(name, [output]))
    assert (text, [(name, json.loads(arguments)) for name, arguments in found]) == (content, calls)


@pytest.mark.parametrize(("name", "output"), [(name, output) for name, output, *_ in CASES] + PLAIN)
def test_the_result_does_not_depend_on_how_the_text_was_cut(name: str, output: str) -> None:
    whole = summary(read(name, [output]))
    for pos in range(len(output)):
        assert summary(read(name, [output[:pos], output[pos:]])) == whole, pos
    for size in (1, 2, 3):
        assert summary(read(name, cuts(output, size))) == whole


@pytest.mark.parametrize(("name", "output"), PLAIN)
def test_what_is_no_call_is_content_to_the_last_character(name: str, output: str) -> None:
    assert summary(read(name, [output])) == (output, [])


@pytest.mark.parametrize(("name", "output", "content", "calls"), CASES)
def test_an_answer_cut_off_keeps_what_there_was(
    name: str, output: str, content: str, calls: list[tuple[str, object]]
) -> None:
    """At its limit of tokens an answer may end anywhere: nothing raises, and no argument is invented."""
    _, whole = summary(read(name, [output]))
    for pos in range(len(output)):
        _, found = summary(read(name, [output[:pos]]))
        assert len(found) <= len(whole)
        for (called, arguments), (expected, all_arguments) in zip(found, whole, strict=False):
            assert called == expected
            assert all_arguments.startswith(arguments.removesuffix("}").removesuffix('"'))


def test_arguments_arrive_while_they_are_written() -> None:
    parser = ToolCallParser(TOOL_CALL_FORMATS["qwen25"], TOOLS)
    assert parser.feed("Well, ") == [Content("Well,")]  # the blank may stand in front of a call
    assert parser.feed('then.\n<tool_call>{"name": "weather", "arg') == [Content(" then."), CallBegun("weather")]
    assert parser.feed('uments": {"city": "Par') == [Arguments('{"city": "Par')]
    assert parser.feed("is\\") == [Arguments("is")]
    assert parser.feed('""}') == [Arguments('\\""}')]
    parser = ToolCallParser(TOOL_CALL_FORMATS["qwen3_coder"], TOOLS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert parser.feed('line "1"\n') == [Arguments('line \\"1\\"')]
    assert parser.feed("line 2") == [Arguments("\\nline 2")]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.sampled_from([
            "<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"weather"', '"arguments"', '"parameters"', ",",
            "[", "]", "\n", " ", "a", "\\", '"', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";", "now(", ")", "city='",
            "'",
            "<function=", "now>", "<parameter=", "city>", "</parameter>", "</function>", SEP, "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "now",
        ]),
        max_size=25,
    ),
)  # fmt: skip
def test_any_text_gives_the_same_in_any_cut(name: str, parts: list[str]) -> None:
    whole = summary(read(name, ["".join(parts)]))
    assert summary(read(name, parts)) == whole
    assert summary(read(name, cuts("".join(parts), 1))) == whole


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_long_texts_are_searched_once(name: str) -> None:
    """Work grows as the text does: what was searched is not searched again with each chunk."""
    starts = {
        "qwen25": "<tool_call>",
        "hermes": "<tool_call>",
        "mistral": "[TOOL_CALLS]",
        "qwen3_coder": "<function=now>",
    }
    opening = {"pythonic": "[now(a='", "json": '[{"name": "now", "parameters": {"a": "'}.get(
        name, '{"name": "now", "parameters": {"a": "'
    )
    text = starts.get(name, "") + opening + "x)" * 30_000
    content, calls = summary(read(name, cuts(text, 4)))
    assert len(content) + sum(len(arguments) for _, arguments in calls) > 30_000


# Outputs that are kept whole while they arrive, since only their end tells what they are.
KEPT = [
    ("qwen25", '<tool_call>{"arguments": {"a": "', "x" * 40_000, '"}, "name": "now"}'),
    ("qwen25", '<tool_call>{"name": "now", "arguments": "', "x" * 40_000, '"}'),
    ("qwen25", '<tool_call>{"name": "now", "id": ', "1" * 40_000, "}"),
    ("qwen25", "<tool_call>", "\n" * 40_000, '{"name": "now"}</tool_call>'),
    ("qwen25", "a", " " * 40_000, "b"),
    ("llama3", "", "\n" * 40_000, '{"name": "now"}'),
    ("pythonic", "[weather(city='", "x" * 40_000, "')]"),
    ("pythonic", "", "\n" * 40_000, "[now()]"),
    ("json", '[{"parameters": ["', "x" * 40_000, '"], "name": "now"}]'),
    ("mistral", "[TOOL_CALLS]now[ARGS]", "\n" * 40_000, "{}"),
    ("deepseekv3", f"<｜tool▁call▁begin｜>now{SEP}{{}}", "x" * 40_000, "<｜tool▁call▁end｜>"),
    ("qwen3_coder", "<function=weather><parameter=fields>[", "1," * 20_000, "1]</parameter></function>"),
    ("qwen3_coder", "<function=weather><parameter=", "x" * 40_000, ">1</parameter></function>"),
    ("glm45", "<tool_call>weather<arg_key>fields</arg_key><arg_value>[", "1," * 20_000, "1]</arg_value></tool_call>"),
    ("minimax-m2", '<minimax:tool_call><invoke name="weather"><parameter name="fields">[', "1," * 20_000,
     "1]</parameter></invoke></minimax:tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "begin", "long", "end"), KEPT)
def test_a_piece_costs_as_much_late_as_early(name: str, begin: str, long: str, end: str) -> None:
    """A new piece is added to the text that is still to be read, and this is searched: if all of a call that has
    arrived were that text, a call of a megabyte would cost hundreds of gigabytes of copies."""
    parser = ToolCallParser(FORMATS[name], TOOLS)
    work = 0
    for piece in (begin, *cuts(long, 4), end):
        work += len(parser._source.text) + len(piece)
        parser.feed(piece)
    parser.finish()
    assert work < 10 * len(long)
    assert summary(read(name, [begin, *cuts(long, 4), end])) == summary(read(name, [begin + long + end]))


def test_every_flag_value_has_a_format() -> None:
    assert set(flags_of(ServerArgs)["tool_call_parser"].spec.choices or ()) == set(TOOL_CALL_FORMATS)


def test_formats_are_told_from_templates() -> None:
    assert tool_call_format_of("... <tool_call>\n{{ x }} ...") == "qwen25"
    assert tool_call_format_of("<tool_call>\n<function=example>") == "qwen3_coder"
    assert tool_call_format_of("<seed:tool_call>\n<function=example>") == "seed_oss"
    assert tool_call_format_of("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>") == "glm45"
    assert tool_call_format_of('"<minimax:tool_call>"\n<invoke name="tool-name-1">') == "minimax-m2"
    assert tool_call_format_of("[TOOL_CALLS][") == "mistral"
    assert tool_call_format_of("<｜tool▁calls▁begin｜>") == "deepseekv3"
    assert tool_call_format_of('{"name": f, "parameters": dictionary of argument name and its value}') == "llama3"
    assert tool_call_format_of("{% for message in messages %}") is None
