"""Makes the requests: synthetic prompts and images from a seed, or prompts from a file (ShareGPT's layout, custom JSON
or JSONL). Nothing is downloaded.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from fenceline.benchmarking.args import BenchArgs, image_size
from fenceline.benchmarking.endpoints import backend_kind
from fenceline.benchmarking.records import BenchRequest, Content, Turn, joined
from fenceline.benchmarking.tokenizer import Tokenizer, count_tokens
from fenceline.config import user_path

# The words of which synthetic prompts are made.
_TEXT = """
a about above across act add after again age ago air all alone along also always am among and animal answer any
apple are area arm around art as ask at away baby back bad ball bank base be bear beat bed before begin behind
bell best better between big bird black blue boat body book both bottom box boy bread bring brother build but
buy by call came can car card care carry case cat catch cause cell center change check child choose circle city
class clean clear climb close cloud coast cold color come common cook cool corn count country course cover cow
cross cry cut dance dark day deal deep did different do doctor dog door down draw dream dress drink drive dry
each early earth east easy eat edge egg eight end energy engine enough even evening ever every eye face fact
fall family far farm fast father feel feet few field fight figure fill find fine fire first fish five floor fly
follow food foot for forest form four free fresh friend from front fruit full game garden gave get girl give
glass go gold good grass great green ground group grow hand happy hard has hat have he head hear heart heavy
help her here high hill him his hold home horse hot hour house how hundred ice idea if in iron is island it job
join just keep key kind king know lake land large last late laugh law lead learn leave left leg let letter life
light like line list listen little live long look lost love low machine made make man many map mark may me mean
meet milk mind minute miss money month moon more morning most mother mountain move much music my name near need
never new next night nine no north nose not note now number of off often oil old on one only open or order other
our out over own page paper part pass past path pay people place plan plant play point poor power press pull put
question quick quiet rain ran reach read ready real red rest rich ride right ring rise river road rock room
round row run sad safe said sail salt same sand save say school sea seat second see seed sell send seven shape
she ship shoe shop short show side sign silver simple sing sister sit six size skin sky sleep slow small snow so
soft some son song soon sound south space speak spring stand star start stay step still stone stop story street
strong study such sun sure swim table tail take talk tall tell ten test than that the their them then there
these they thing think this three through time to today together told tomorrow too took tool top town tree true
try turn two under until up us use very visit voice wait walk wall want war warm was wash watch water wave way
we wear week well went were west what wheel when where which while white who why wide wife wild will wind window
winter wish with woman wood word work world write year yellow yes yet you young your
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())


_USER_ROLES = ("human", "user")
_DEFAULT_OUTPUT_LEN = 256  # for custom records without output_len


def _from_file(args: BenchArgs, tokenizer: Tokenizer, rng: np.random.Generator) -> list[BenchRequest]:
    """The first question of each record, or for multi-turn the first --multi-turn-num-turns questions of each record
    that has at least two: up to --num-prompts records in random order."""
    records = read_records(args.dataset_path)
    max_turns = args.multi_turn_num_turns if args.dataset_name == "multi-turn" else 1
    min_turns = min(max_turns, 2)
    requests: list[BenchRequest] = []
    for i in rng.permutation(len(records)):
        turns = _turns(records[i], args, tokenizer, max_turns)
        if len(turns) >= min_turns and _fits(turns, args):
            requests.append(BenchRequest(tuple(turns)))
        if len(requests) == args.num_prompts:
            break
    if not requests:
        raise ValueError(
            f"{args.dataset_path} holds no usable record: each needs 'conversations' or 'messages' with a question and "
            "an answer, or 'prompt' (text or token ids)"
        )
    return requests


def read_records(path: str) -> list[dict[str, Any]]:
    """The JSON objects in a file, which is one JSON array or has one object per line. Raises ValueError if the file
    cannot be read, or is malformed."""
    try:
        text = user_path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            # Not splitlines(): a text in JSON may contain what else ends a line in Unicode.
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--dataset-path {path}: {error}") from error
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"--dataset-path {path}: every record must be a JSON object")
    return list(records)


def _turns(record: dict[str, Any], args: BenchArgs, tokenizer: Tokenizer, max_turns: int) -> list[Turn]:
    """At most ``max_turns`` user turns of the record; fewer, or none, if it is shorter or malformed."""
    if "prompt" in record or "text" in record or "input_ids" in record:
        return _prompt_turn(record, args, tokenizer)
    messages = (record[key] for key in ("conversations", "conversation", "messages") if key in record)
    pairs = _question_answer_pairs(next(messages, []))
    turns = []
    for question, answer in pairs[:max_turns]:
        text = question + args.prompt_suffix
        num_answer = len(tokenizer.encode(answer, add_special_tokens=False))
        if count_tokens(tokenizer, text) < 2 or num_answer < 2:  # too short to measure, as in SGLang
            break
        turns.append(_turn(text, args.sharegpt_output_len or num_answer, args, tokenizer))
    return turns


def _turn(text: str, output_len: int, args: BenchArgs, tokenizer: Tokenizer) -> Turn:
    content: Content = tokenizer.encode(text) if args.tokenize_prompt else text
    return Turn(content, count_tokens(tokenizer, text), output_len)


def _prompt_turn(record: dict[str, Any], args: BenchArgs, tokenizer: Tokenizer) -> list[Turn]:
    prompt = record.get("prompt", record.get("text", record.get("input_ids")))
    lens = (record.get(key) for key in ("output_len", "output_tokens", "max_new_tokens", "max_tokens"))
    named = next((n for n in lens if isinstance(n, int) and n > 0), _DEFAULT_OUTPUT_LEN)
    output_len = args.sharegpt_output_len or named
    if isinstance(prompt, str) and prompt:
        return [_turn(prompt + args.prompt_suffix, output_len, args, tokenizer)]
    if isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt):
        return [Turn(list(prompt), len(prompt), output_len)]
    return []


def _question_answer_pairs(messages: object) -> list[tuple[str, str]]:
    """Pairs (question, answer). Messages before the first question, such as a system prompt, are left out."""
    if not isinstance(messages, list):
        return []
    texts: list[tuple[str, str]] = []
    for message in messages:
        value = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if not isinstance(value, str):
            return []
        texts.append((str(message.get("from", message.get("role", ""))), value))
    named = any(role for role, _ in texts)
    while named and texts and texts[0][0] not in _USER_ROLES:
        texts.pop(0)
    return [(texts[i][1], texts[i + 1][1]) for i in range(0, len(texts) - 1, 2)]


def _fits(turns: list[Turn], args: BenchArgs) -> bool:
    if args.sharegpt_context_len is None:
        return True
    return sum(turn.prompt_len + turn.output_len for turn in turns) <= args.sharegpt_context_len


def build_requests(args: BenchArgs, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    """The requests of a run. They depend only on ``args`` (including its seed) and the tokenizer. Raises ValueError if
    the dataset needs a tokenizer, or the file cannot be read or has no usable record."""
    rng = np.random.default_rng(args.seed)
    if args.dataset_name == "random-ids":
        return _random_ids(args, tokenizer, rng)
    if tokenizer is None:
        raise ValueError(f"--dataset-name {args.dataset_name} needs a tokenizer: pass --tokenizer DIR_OR_HUB_ID")
    if args.dataset_name == "image":
        return _image(args, TextMaker(tokenizer, rng), rng, args.num_prompts)
    if args.dataset_name == "random":
        return _random(args, TextMaker(tokenizer, rng, args.tokenize_prompt), rng)
    if args.dataset_name == "generated-shared-prefix":
        return _shared_prefix(args, TextMaker(tokenizer, rng, args.tokenize_prompt), rng)
    if args.dataset_name == "multi-turn" and not args.dataset_path:
        return _multi_turn(args, TextMaker(tokenizer, rng, args.tokenize_prompt), rng)
    return _from_file(args, tokenizer, rng)


def build_warm_up(args: BenchArgs, tokenizer: Tokenizer | None, requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """What is sent before ``requests`` are measured: the first of them, --warmup-requests times. Images have their own
    instead, so that no image of ``requests`` is known to the server; or with --image-pool, all of the pool are."""
    if args.dataset_name != "image" or tokenizer is None or not args.warmup_requests:
        return [*requests[:1]] * args.warmup_requests
    rng = np.random.default_rng([args.seed, 1])
    num = max(args.warmup_requests, -(-(args.image_pool or 0) // args.image_count))
    return _image(args, TextMaker(tokenizer, rng), rng, num)


class TextMaker:
    """Makes text with a given number of tokens from plain words, or with ``as_ids`` token ids, with exact lengths and
    without special tokens. ``rng``: the run's random generator; each call draws from it."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._as_ids = as_ids
        costs = [len(tokenizer.encode(" " + word, add_special_tokens=False)) for word in WORDS]
        self._costs = np.asarray(costs, dtype=np.int64)
        self._num_special = count_tokens(tokenizer, "")
        self._cost_of = dict(zip(WORDS, costs, strict=True))
        self._cheap = np.flatnonzero(self._costs == self._costs.min())

    def content(self, num_tokens: int) -> Content:
        """Text (or ids) of ``num_tokens`` tokens. In text, special tokens that the tokenizer adds (BOS) are counted."""
        if self._as_ids:
            ids = self._tokenizer.encode(" ".join(self._words(num_tokens)), add_special_tokens=False)
            return [ids[i % len(ids)] for i in range(num_tokens)]
        return " ".join(self._fitted(num_tokens))

    def count(self, content: Content) -> int:
        """The number of tokens of ``content`` as the server will count them."""
        return count_tokens(self._tokenizer, content) if isinstance(content, str) else len(content)

    def _words(self, num_tokens: int) -> list[str]:
        """At least one word, and as few as are needed for ``num_tokens`` tokens or slightly more."""
        guess = max(1, num_tokens // int(self._costs.min()))
        drawn = self._rng.integers(0, len(WORDS), size=guess)
        sums = np.cumsum(self._costs[drawn])
        num = int(np.searchsorted(sums, num_tokens)) + 1
        return [WORDS[i] for i in drawn[:num]]

    def _fitted(self, num_tokens: int) -> list[str]:
        """Words whose joined text has ``num_tokens`` tokens, or nearly so if this cannot be reached exactly."""
        words = self._words(max(1, num_tokens - self._num_special))
        for _ in range(8):  # tokens of adjacent words may merge, so the length is measured and corrected
            excess = self.count(" ".join(words)) - num_tokens
            if excess == 0:
                break
            while excess > 0 and words:
                excess -= self._cost_of[words.pop()]
            while excess < 0 or not words:
                word = WORDS[int(self._rng.choice(self._cheap))]
                words.append(word)
                excess += self._cost_of[word]
        return words


def draw_lens(rng: np.random.Generator, full: int, range_ratio: float, num: int) -> list[int]:
    """``num`` random lengths, uniform in [max(1, full * range_ratio), full]."""
    low = max(1, int(full * range_ratio))
    return [int(n) for n in rng.integers(low, full + 1, size=num)]


def _random(args: BenchArgs, maker: TextMaker, rng: np.random.Generator) -> list[BenchRequest]:
    input_lens = draw_lens(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    output_lens = draw_lens(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    contents = [maker.content(n) for n in input_lens]
    return [
        BenchRequest((Turn(content, maker.count(content), output_len),))
        for content, output_len in zip(contents, output_lens, strict=True)
    ]


def _image(args: BenchArgs, maker: TextMaker, rng: np.random.Generator, num: int) -> list[BenchRequest]:
    """``num`` requests of random text, each with --image-count images."""
    urls = _image_urls(args, rng)
    return [
        BenchRequest((replace(request.turns[0], images=tuple(islice(urls, args.image_count))),))
        for request in _random(replace(args, num_prompts=num), maker, rng)
    ]


def _image_urls(args: BenchArgs, rng: np.random.Generator) -> Iterator[str]:
    """Images without end: each a new one, drawn from ``rng``, or with --image-pool those of the pool in turn, which
    depend on --seed alone."""
    if args.image_pool is None:
        while True:
            yield _image_url(args, rng)
    of_pool = np.random.default_rng([args.seed, 2])
    yield from cycle([_image_url(args, of_pool) for _ in range(args.image_pool)])


def _image_url(args: BenchArgs, rng: np.random.Generator) -> str:
    from PIL import Image

    height, width = image_size(args.image_resolution)
    if args.image_content == "blank":
        image = Image.new("RGB", (width, height), "white")
    else:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    file = io.BytesIO()
    image.save(file, args.image_format)
    return f"data:image/{args.image_format};base64,{base64.b64encode(file.getvalue()).decode()}"


def _random_ids(args: BenchArgs, tokenizer: Tokenizer | None, rng: np.random.Generator) -> list[BenchRequest]:
    input_lens = draw_lens(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    output_lens = draw_lens(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    if tokenizer is None and args.vocab_size is None:
        raise ValueError("--dataset-name random-ids needs --tokenizer DIR_OR_HUB_ID or --vocab-size N")
    vocab_size = args.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    special = tokenizer.all_special_ids if tokenizer else []
    allowed = np.setdiff1d(np.arange(vocab_size), np.asarray(special, dtype=np.int64))
    as_text = backend_kind(args.backend) == "chat"
    if as_text and tokenizer is None:
        raise ValueError(f"{args.backend} takes text only: pass --tokenizer so that random ids can be decoded")
    requests = []
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        ids: Content = [int(i) for i in rng.choice(allowed, size=input_len)]
        content = tokenizer.decode(ids) if as_text and tokenizer and not isinstance(ids, str) else ids
        requests.append(BenchRequest((Turn(content, input_len, output_len),)))
    return requests


def _shared_prefix(args: BenchArgs, maker: TextMaker, rng: np.random.Generator) -> list[BenchRequest]:
    """Groups of conversations that start with the same system prompt. --num-prompts does not apply."""
    num = args.gsp_num_groups * args.gsp_prompts_per_group
    system_lens = draw_lens(rng, args.gsp_system_prompt_len, args.gsp_range_ratio, args.gsp_num_groups)
    question_lens = draw_lens(rng, args.gsp_question_len, args.gsp_range_ratio, num * args.gsp_num_turns)
    output_lens = draw_lens(rng, args.gsp_output_len, args.gsp_range_ratio, num * args.gsp_num_turns)
    systems = [maker.content(n) for n in system_lens]
    requests = []
    for i in range(num):
        turns = []
        for turn in range(args.gsp_num_turns):
            k = i * args.gsp_num_turns + turn
            content = maker.content(question_lens[k])
            if turn == 0:
                content = joined(systems[i // args.gsp_prompts_per_group], content, "\n\n")
            turns.append(Turn(content, maker.count(content), output_lens[k]))
        requests.append(BenchRequest(tuple(turns)))
    if args.gsp_ordered:
        return requests
    return [requests[i] for i in rng.permutation(num)]


def _multi_turn(args: BenchArgs, maker: TextMaker, rng: np.random.Generator) -> list[BenchRequest]:
    later_len = args.multi_turn_question_len or args.random_input_len
    requests = []
    for _ in range(args.num_prompts):
        lens = draw_lens(rng, args.random_input_len, args.random_range_ratio, 1)
        lens += draw_lens(rng, later_len, args.random_range_ratio, args.multi_turn_num_turns - 1)
        output_lens = draw_lens(rng, args.random_output_len, args.random_range_ratio, len(lens))
        contents = [maker.content(n) for n in lens]
        turns = [
            Turn(content, maker.count(content), output_len)
            for content, output_len in zip(contents, output_lens, strict=True)
        ]
        requests.append(BenchRequest(tuple(turns)))
    return requests
