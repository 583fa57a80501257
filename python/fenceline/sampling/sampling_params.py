"""The sampling parameters of a request. They are a message struct, which is sent between processes as it is."""

from __future__ import annotations

import math

import msgspec

from fenceline.config.request_limits import MAX_LOGIT_BIAS, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

MAX_BIAS = 100.0
TOP_K_ALL = -1
MIN_REPETITION_PENALTY = 1e-3  # logits are divided by the penalty and must stay finite
GREEDY_BELOW = 1e-6  # lower temperatures count as 0, as in SGLang
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request, with SGLang's names and meanings.

    ``temperature`` 0 (or below 1e-6) means greedy, and so does ``top_k`` 1. ``top_k`` -1 means the whole
    vocabulary. ``top_k``, ``top_p`` and ``min_p`` each apply to the full distribution after temperature; a token
    must pass all of them, and a token that ties with the last one kept is kept too. If ``seed`` is None, the scheduler
    draws one from the server's ``--random-seed``; the noise of a draw depends only on (seed, position).
    ``repetition_penalty`` applies to the tokens of prompt and output, ``presence_penalty`` and ``frequency_penalty``
    to those of the output; ``logit_bias`` is added before them. Until ``min_new_tokens`` tokens exist, no
    end-of-sequence or stop token is sampled. ``stop`` strings are found by the detokenizer, ``stop_token_ids`` by the
    scheduler; ids outside the vocabulary never match. ``max_new_tokens`` is reduced to what the context can hold.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the arg-max, so that no random draw is made."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def needs_penalties(self) -> bool:
        """Whether token counts of this request have to be kept on the device."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def verify(self, vocab_size: int) -> None:
        """Raise ``ValueError``, which names the remedy, for the first value that is out of range."""
        self.verify_numbers()
        self.verify_tokens(vocab_size)

    def verify_numbers(self) -> None:
        """:meth:`verify` for everything except stop strings, stop tokens and biases."""
        # Messages are made only where they are needed: every request passes here before its first token.
        for name in _NUMBERS:
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {value}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not (self.top_k == TOP_K_ALL or 1 <= self.top_k < 2**63):  # it becomes an int64
            raise ValueError(f"top_k must be -1 or at least 1, got {self.top_k}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= (value := getattr(self, name)) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {value}")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= 2.0:
            raise ValueError(
                f"repetition_penalty must be in [{MIN_REPETITION_PENALTY:g}, 2], got {self.repetition_penalty}"
            )
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in [0, max_new_tokens={self.max_new_tokens}], got {self.min_new_tokens}"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError("seed must fit in 64 bits")

    def verify_tokens(self, vocab_size: int) -> None:
        """:meth:`verify` for stop strings, stop tokens and biases, of which there may be many."""
        check_counts(len(self.stop), len(self.stop_token_ids), len(self.logit_bias or ()))
        if not all(self.stop):
            raise ValueError("stop must not have an empty string")
        num_chars = sum(map(len, self.stop))
        if num_chars > MAX_STOP_CHARS:
            raise ValueError(f"stop may have at most {MAX_STOP_CHARS} characters in all its strings, got {num_chars}")
        for token, bias in (self.logit_bias or {}).items():
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias token id {token} is outside the vocabulary of {vocab_size}")
            if not abs(bias) <= MAX_BIAS:  # nor is it NaN
                raise ValueError(f"logit_bias values must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {bias}")


def check_counts(num_stops: int, num_stop_token_ids: int, num_biases: int) -> None:
    """Raise ValueError if there are more stop strings, stop tokens or biases than one request may have."""
    for num, most, what in (
        (num_stops, MAX_STOP_STRINGS, "stop may have at most {} strings"),
        (num_stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids may have at most {} ids"),
        (num_biases, MAX_LOGIT_BIAS, "logit_bias may have at most {} entries"),
    ):
        if num > most:
            raise ValueError(f"{what.format(most)}, got {num}")
