"""How the turns of a conversation become prompts: text, ids, chat messages or templated text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.endpoints import backend_kind
from fenceline.benchmarking.records import Content, Message, Prompt, Reply
from fenceline.benchmarking.tokenizer import Tokenizer

Style = Literal["plain", "messages", "template", "template-ids"]


def prompt_style(args: BenchArgs) -> Style:
    """How prompts are built. A chat endpoint applies its own template, so the client does not."""
    if backend_kind(args.backend) == "chat":
        return "messages"
    if args.apply_chat_template:
        return "template-ids" if args.tokenize_prompt else "template"
    return "plain"


def check_template(args: BenchArgs, tokenizer: Tokenizer | None) -> None:
    """Refuse --apply-chat-template where the tokenizer has no template.

    Raises:
        ValueError: with the remedy.
    """
    if prompt_style(args).startswith("template") and (tokenizer is None or not tokenizer.chat_template):
        raise ValueError("--apply-chat-template: the tokenizer has no chat template; leave the flag out")


@dataclass(slots=True)
class Conversation:
    """The history of one conversation. Each answer is appended before the next question."""

    style: Style
    tokenizer: Tokenizer | None = None
    _messages: list[Message] = field(default_factory=list)
    _history: Content | None = None

    def ask(self, content: Content) -> Prompt:
        """The prompt that asks ``content`` after everything said so far. The caller may keep it."""
        if self.style == "plain":
            self._history = content if self._history is None else _concat(self._history, content)
            return self._history
        self._messages.append({"role": "user", "content": self._as_text(content)})
        if self.style == "messages":
            return list(self._messages)
        assert self.tokenizer is not None, "check_template passed"
        text = self.tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False)
        if self.style == "template-ids":
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return text

    def answer(self, reply: Reply) -> None:
        """Append the server's answer to the history."""
        if self.style != "plain":
            self._messages.append({"role": "assistant", "content": reply.text})
        elif isinstance(self._history, str):
            self._history += reply.text
        elif self._history is not None:
            self._history = self._history + (reply.output_ids or self._encode(reply.text))

    def _as_text(self, content: Content) -> str:
        if isinstance(content, str):
            return content
        if self.tokenizer is None:
            raise ValueError("chat prompts are text: pass --tokenizer so that token ids can be decoded")
        return self.tokenizer.decode(content)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return []  # the server gave no ids and we cannot make any: the answer is left out
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _concat(head: Content, tail: Content) -> Content:
    if isinstance(head, str):
        assert isinstance(tail, str), "turns of one conversation are of one kind"
        return head + tail
    assert not isinstance(tail, str), "turns of one conversation are of one kind"
    return head + tail
