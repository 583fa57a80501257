"""``fenceline chat``: a conversation in the terminal with a server that has OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

_COMMANDS = "/reset forgets the conversation, /system TEXT sets the system prompt, /exit ends"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # neither a model nor a server steers the terminal
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CONNECT_S = 10.0

Message = dict[str, str]


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; ``--url``, ``--model-name``, ``--system-prompt`` and ``--quick`` are vLLM's."""
    parser = argparse.ArgumentParser(
        prog="fenceline chat",
        description="Talk to a running server in the terminal. What is piped in is sent as one message.",
        epilog=f"In the conversation {_COMMANDS}, and Ctrl-C stops an answer.",
    )
    parser.add_argument("address", nargs="?", metavar="URL", help="the server (default: http://127.0.0.1:30000)")
    parser.add_argument("--url", metavar="URL", default="http://127.0.0.1:30000", help="the same")
    parser.add_argument("--model", "--model-name", metavar="NAME", help="the model (default: the server's first)")
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", default="", help="the system prompt")
    parser.add_argument("--quick", "-q", metavar="TEXT", help="send this message, print the answer and end")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: $OPENAI_API_KEY)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 1, with one line on stderr, if there is no answer."""
    args = build_parser().parse_args(argv)
    try:
        server = _Server(args.address or args.url, args.api_key or os.environ.get("OPENAI_API_KEY", ""))
        chat = _Chat(server, args.model or server.first_model(), args.system)
        if args.quick is not None:
            chat.say(args.quick)
        elif sys.stdin.isatty():
            chat.converse()
        else:
            chat.say(sys.stdin.read())
    except ValueError as error:
        print(f"fenceline chat: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads the answer has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's end tries to write again
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


class _Chat:
    """The conversation so far."""

    def __init__(self, server: _Server, model: str, system: str) -> None:
        self._server = server
        self._model = model
        self._system = system
        self._turns: list[Message] = []
        self._colours = sys.stdout.isatty()
        self._is_conversation = False

    def converse(self) -> None:
        """Read messages and commands until there are no more. Ctrl-C stops an answer, which is kept as far as it
        came."""
        self._is_conversation = True
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() has its keys then, and a history
        print(f"{self._model} at {self._server.url}: {_COMMANDS}.")
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                return print()
            command, _, rest = text.partition(" ")
            match command:
                case "":
                    continue
                case "/exit" | "/quit":
                    return None
                case "/reset":
                    self._turns = []
                case "/system":
                    self._system = rest.strip()
                case _ if re.fullmatch("/[a-z]+", text):
                    print(f"{text} is no command: {_COMMANDS}.")
                case _:
                    try:
                        self.say(text)
                    except ValueError as error:
                        print(error)

    def say(self, text: str) -> None:
        """Send ``text`` and print the answer while it comes. Raises ValueError, one line, if it fails; the conversation
        is as before then."""
        if not text.strip():
            raise ValueError("nothing to send: the message is empty")
        turns = [*self._turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer: list[str] = []
        has_thought = False
        with contextlib.closing(self._server.answer(self._model, [*system, *turns])) as pieces:
            try:
                for is_answer, piece in pieces:
                    if is_answer and has_thought and not answer:
                        print("\n")
                    if is_answer:
                        answer.append(piece)
                    has_thought = has_thought or (self._colours and not is_answer)
                    self._print(is_answer, piece)
            except KeyboardInterrupt:
                if not self._is_conversation:
                    raise
            finally:
                if answer or has_thought:
                    print()
        if answer:
            self._turns = [*turns, {"role": "assistant", "content": "".join(answer)}]

    def _print(self, is_answer: bool, piece: str) -> None:
        """Print a piece of the answer, or of the reasoning if somebody watches."""
        if not self._colours:
            piece = piece if is_answer else ""
        else:
            piece = _CONTROLS.sub("", piece)
            piece = piece if is_answer else f"{_DIM}{piece}{_PLAIN}"
        print(piece, end="", flush=True)


class _Server:
    """A server at ``url``: its scheme may be missing and its path may be /v1. Every error is a ValueError of a line."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: not an address; give one such as http://127.0.0.1:30000")
        if not (key.isascii() and key.isprintable()):
            raise ValueError("--api-key or OPENAI_API_KEY: a key has printable ASCII characters alone; check it")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts = parts
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def first_model(self) -> str:
        """The name of the first model that is listed."""
        with self._ask("GET", "/v1/models", None) as response:
            text = response.read()
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self.url}: lists no models as OpenAI's API does; name one with --model") from None

    def answer(self, model: str, messages: list[Message]) -> Generator[tuple[bool, str], None, None]:
        """The pieces of text, each with whether it belongs to the answer and not to the reasoning. Closing the
        generator aborts the request."""
        body = {"model": model, "messages": messages, "stream": True}
        with self._ask("POST", "/v1/chat/completions", body) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                yield from self._pieces(data)

    def _pieces(self, data: bytes) -> list[tuple[bool, str]]:
        """The pieces in one event of a stream. Raises ValueError if it tells an error, or has another form."""
        try:
            event = json.loads(data)
            error = event.get("error")
            deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
            pieces = [(name == "content", d.get(name)) for d in deltas for name in ("reasoning_content", "content")]
        except (ValueError, AttributeError, TypeError):
            raise ValueError(f"{self.url}: streams no answer as OpenAI's API does: {_message(data)[:80]}") from None
        if error:
            raise ValueError(_message(event))
        return [(is_answer, str(piece)) for is_answer, piece in pieces if piece]

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=_CONNECT_S)
        with contextlib.closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(None)  # the first token may take long
                target = urlsplit(self.url).path + path
                connection.request(method, target, None if body is None else json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ValueError(f"{self.url}: {response.status}, {_message(response.read())}")
                yield response
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "strerror", None) or error or type(error).__name__
                raise ValueError(f"{self.url}: {reason}; fenceline serve MODEL starts a server") from error


def _message(answer: Any) -> str:
    """What an error says, of a body or an event, in a line."""
    try:
        event = json.loads(answer) if isinstance(answer, bytes) else answer
        error = event.get("error", event)
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, AttributeError, KeyError):
        text = answer
    return _CONTROLS.sub("", " ".join(str(text).split()))[:500]
