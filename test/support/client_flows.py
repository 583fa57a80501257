"""What the tests of clients ask the model that calls tools, and what it answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

HELLO, ANSWER = "Hello!", "Hello! How can I help you?"
NUM_IN, NUM_OUT = 10, 9  # tokens of HELLO's prompt and of ANSWER
SUM, ARGUMENTS = "What is 4821 + 377?", {"expression": "4821 + 377"}
RESULT, LAST = "99123", "The answer is 99123."  # not the sum: the last answer can only come from the tool


class Stop(BaseModel):
    """A stop."""

    code: Literal["OSL", "FCO"]


class Trip(BaseModel):
    """An answer of this schema is short. Anthropic's SDK leaves bounds out of schemas, and without them the model would
    write numbers, texts and lists for ever."""

    kind: Literal["city", "village"]
    days: Literal[3, 7]
    sunny: bool
    stop: Stop
    note: Literal["early", "late"] | None
