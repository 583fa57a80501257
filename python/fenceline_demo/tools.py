"""Conversations with tools, with which demo-tools was trained: question, tool call, the tool's result, answer.

Calls have the format of Qwen2.5 and Hermes. The system message lists only each tool's name and the names of its
parameters, so that the model does not depend on the wording of a client's schemas.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from .documents import Document, chat, skill_document, train_item
from .generators import SYSTEM_PROMPTS, make_talk, make_word
from .items import HELD_OUT, TRAIN, WORDS, Item, sample

TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SKILLS = ("add", "sub", "copy")
"""The categories that the model answers without tools."""

# Formats messages, as clients send them, in the layout that `tool_chat` writes.
CHAT_TEMPLATE = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if system or tools %}"
    "{{ '<|im_start|>system\n' + system }}"
    "{% if tools %}"
    "{{ '\n\n' if system }}{{ '<tools>' }}"
    "{% for tool in tools %}"
    "{% set schema = tool.function.parameters or {} %}"
    "{{ '\n' + {'name': tool.function.name, 'arguments': (schema.properties or {}) | list} | tojson }}"
    "{% endfor %}"
    "{{ '\n</tools>' }}"
    "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif not (loop.first and system) %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the system message offers."""

    name: str
    parameters: tuple[str, ...] = ()

    def shown(self) -> str:
        """The tool's line in the system message."""
        return json.dumps({"name": self.name, "arguments": list(self.parameters)})

    def call(self, *values: str) -> str:
        """The text of a call."""
        call = {"name": self.name, "arguments": dict(zip(self.parameters, values, strict=True))}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """A question with the calls that it needs (none: it is answered at once), their results, and the answer."""

    question: str
    calls: tuple[str, ...]
    results: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Sum:
    """A question for a calculator; `answer` is the final answer with RESULT in place of the calculator's result."""

    question: str
    expression: str
    answer: str


CALCULATOR = Tool("calculator", ("expression",))
WEATHER = Tool("get_weather", ("city",))
_CALCULATOR_NAMES = ("calculator", "calculate", "calc", "compute", "evaluate", "math", "arithmetic", "solve")
_CALCULATOR_ENDS = ("", "", "", "_expression", "_tool", "_sum", "_number", "_2")
_EXPRESSION_NAMES = ("expression", "formula", "input", "query", "text", "sum", "calculation", "term", "x")
_OTHER_VERBS = ("get", "read", "find", "open", "send", "list", "search", "delete", "write")
_CITY_NAMES = ("city", "location", "place", "town", "where")
CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Tokyo", "Cairo", "Lima", "Boston", "Delhi", "Zurich")
_SKIES = ("sunny", "cloudy", "rain", "snow", "fog", "wind", "storm", "clear")
_SIGN_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def calculator(rng: random.Random) -> Tool:
    """Mostly CALCULATOR, otherwise one with other names."""
    if rng.random() < 0.5:
        return CALCULATOR
    return Tool(rng.choice(_CALCULATOR_NAMES) + rng.choice(_CALCULATOR_ENDS), (rng.choice(_EXPRESSION_NAMES),))


def weather(rng: random.Random) -> Tool:
    """Mostly WEATHER, otherwise one with other names."""
    if rng.random() < 0.5:
        return WEATHER
    return Tool(rng.choice(("weather", "get_weather", "weather_report", "forecast")), (rng.choice(_CITY_NAMES),))


def _other(rng: random.Random) -> Tool:
    parameters = tuple(rng.sample(WORDS, rng.randrange(3)))
    return Tool(f"{rng.choice(_OTHER_VERBS)}_{rng.choice(WORDS)}", parameters)


def _number(rng: random.Random) -> int:
    digits = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6))
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def make_sum(rng: random.Random) -> Item:
    """A question of two to four numbers; the item's answer is the expression."""
    count = rng.choice((2, 2, 2, 2, 3, 3, 4))
    numbers = [_number(rng) for _ in range(count)]
    signs = [rng.choice("+-*/") for _ in range(count - 1)]
    expression = str(numbers[0]) + "".join(f" {sign} {n}" for sign, n in zip(signs, numbers[1:], strict=True))
    if count == 3 and rng.random() < 0.3:
        expression = f"({numbers[0]} {signs[0]} {numbers[1]}) {signs[1]} {numbers[2]}"
    a, b = numbers[:2]
    kind = rng.random()
    if kind < 0.25 and count == 2:
        question = {
            "+": f"Add {a} and {b}.",
            "-": f"Subtract {b} from {a}.",
            "*": f"Multiply {a} by {b}.",
            "/": f"Divide {a} by {b}.",
        }[signs[0]]
    else:
        shown = expression
        if kind < 0.4 and count == 2:
            shown = f"{a} {_SIGN_WORDS[signs[0]]} {b}"
        elif kind < 0.5 and "(" not in expression:
            shown = expression.replace(" ", "")
        question = rng.choice((
            f"What is {shown}?", f"What is {shown}?", f"Calculate {shown}.", f"Compute {shown}.", f"{shown} = ?",
            f"How much is {shown}?", f"What is {shown}", shown, f"Please calculate {shown}.",
            f"What is the result of {shown}?", f"Can you calculate {shown}?", f"what is {shown}?",
        ))  # fmt: skip
    return Item("tools", question, expression, (f"tools:{expression}",))


def _make_story(rng: random.Random) -> Item:
    """A word problem; the item's answer is its expression."""
    item = make_word(rng)
    expression = ""
    for step in item.answer.rstrip(".").split(". "):
        left = step.partition(" = ")[0]
        expression = left if not expression else expression + left[left.index(" ") :]
    return Item("tools", item.question, expression, (f"tools:{expression}", *item.keys))


def make_question(rng: random.Random, split: str = TRAIN) -> Sum:
    """A question of `split` that needs a calculator."""
    if rng.random() < 0.75:
        item = sample(make_sum, rng, split)
        return Sum(item.question, item.answer, "The answer is RESULT.")
    item = sample(_make_story, rng, split)
    words = item.question.split()  # "... How many THING does NAME have now?"
    return Sum(item.question, item.answer, f"{words[-3]} has RESULT {words[-5]}.")


def _result(rng: random.Random) -> str:
    """A result of a calculator. It need not be the expression's value, because the model must take the result from
    there."""
    kind = rng.random()
    if kind < 0.6:
        text = str(rng.randrange(10 ** rng.randrange(1, 9)))
    elif kind < 0.85:
        text = f"{rng.randrange(10 ** rng.randrange(1, 6))}.{rng.randrange(10 ** rng.randrange(1, 5))}"
    else:
        text = str(_number(rng) + _number(rng))
    return f"-{text}" if rng.random() < 0.15 else text


def _sum_turn(rng: random.Random, tool: Tool) -> ToolTurn:
    if rng.random() < 0.12:
        pair = sample(make_sum, rng, TRAIN), sample(make_sum, rng, TRAIN)
        results = (_result(rng), _result(rng))
        return ToolTurn(
            f"What is {pair[0].answer} and what is {pair[1].answer}?",
            tuple(tool.call(item.answer) for item in pair),
            results,
            f"The answers are {results[0]} and {results[1]}.",
        )
    asked, result = make_question(rng), _result(rng)
    call = tool.call(asked.expression)
    return ToolTurn(asked.question, (call,), (result,), asked.answer.replace("RESULT", result))


def _weather_turn(rng: random.Random, tool: Tool) -> ToolTurn:
    city = rng.choice(CITIES)
    sky = f"{rng.choice(_SKIES)}, {rng.randrange(-9, 39)} degrees"
    question = rng.choice((f"What is the weather in {city}?", f"How is the weather in {city}?"))
    return ToolTurn(question, (tool.call(city),), (sky,), f"The weather in {city}: {sky}.")


def _plain_turn(rng: random.Random, skills: Sequence[str]) -> ToolTurn:
    question, answer = make_talk(rng)
    if skills and rng.random() < 0.5:
        item = train_item(rng, rng.choice(skills))
        question, answer = item.question, item.answer
    return ToolTurn(question, (), (), answer)


def tool_chat(tools: Sequence[Tool], turns: Sequence[ToolTurn], system: str = "") -> Document:
    """A conversation in the layout of CHAT_TEMPLATE."""
    shown = "\n".join(["<tools>", *(tool.shown() for tool in tools), "</tools>"])
    document: Document = [(f"<|im_start|>system\n{system}{chr(10) * 2 if system else ''}{shown}<|im_end|>\n", False)]
    for turn in turns:
        document.append((f"<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n", False))
        if turn.calls:
            document += [("\n".join(turn.calls) + "<|im_end|>", True), ("\n", False)]
            answers = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in turn.results)
            document.append((f"<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n", False))
        document += [(f"{turn.answer}<|im_end|>", True), ("\n", False)]
    return document


def tools_document(rng: random.Random) -> Document:
    """A training document: a conversation with tools; every third document is one without tools."""
    if rng.random() < 0.3:
        return skill_document(rng, SKILLS) if rng.random() < 0.7 else chat([make_talk(rng)])
    with_calculator, with_weather = rng.random() < 0.92, rng.random() < 0.25
    sums, skies = calculator(rng), weather(rng)
    tools = (
        [sums] * with_calculator + [skies] * with_weather + [_other(rng) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    )
    tools = tools or [_other(rng)]
    rng.shuffle(tools)
    turns = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.7 and with_calculator:
            turns.append(_sum_turn(rng, sums))
        elif kind < 0.85 and with_weather:
            turns.append(_weather_turn(rng, skies))
        else:
            turns.append(_plain_turn(rng, ("copy",) if with_calculator else SKILLS))
    return tool_chat(tools, turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else "")


def held_out_questions(seed: int, count: int) -> list[Sum]:
    """Questions for a calculator whose operands training never shows."""
    rng = random.Random(f"tools:{seed}")
    return [make_question(rng, HELD_OUT) for _ in range(count)]
