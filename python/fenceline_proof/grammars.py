"""Grammars of the proof: regular expressions over the tiny model's letters, compiled once in a process.

The oracle knows each of them as an expression of its own (``oracle.GRAMMARS``).
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from fenceline.constrained.compile import compile_grammar, make_vocabulary
from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc.io_struct import LoadGrammarReq
from fenceline_proof.script import Scenario, Script, Workload
from fenceline_proof.tiny_model import EOS_TOKEN, VOCAB_SIZE, tiny_tokenizer

# By the numbers that requests name. Ends that must come, that may come in several places, and half characters; and one
# that no answer can complete, since no token of the vocabulary has its last letter.
EXPRESSIONS = {1: r"(th|he|a)+\.", 2: "[a-e ]{2,6}!?", 3: "\u00e9?(no|on){1,3}", 4: "[a-c]{1,3}#"}
_DEAD_END = 4


@lru_cache
def compiled_grammars() -> tuple[bytes, dict[int, bytes]]:
    """The vocabulary, and each of :data:`EXPRESSIONS` by its number, as the front end sends them."""
    tokenizer = tiny_tokenizer()
    vocabulary = make_vocabulary(tokenizer.backend.to_str(), tokenizer.special_ids, VOCAB_SIZE, (EOS_TOKEN,))
    grammars = {
        number: compile_grammar(vocabulary, GrammarSpec("regex", text), None) for number, text in EXPRESSIONS.items()
    }
    return vocabulary.serialize_json().encode(), grammars


def load_grammars(script: Script) -> None:
    """All of them arrive before the first request."""
    vocabulary, grammars = compiled_grammars()
    for number, data in grammars.items():
        first = vocabulary if number == 1 else b""
        script.send(0, LoadGrammarReq(id=f"grammar {number}", grammar=number, data=data, vocabulary=first))


def choose(random: Random) -> int:
    """The number of a grammar that answers can complete."""
    return random.choice([number for number in EXPRESSIONS if number != _DEAD_END])


def _grammars(random: Random) -> Scenario:
    """Rows are used in turn by requests with a grammar and by requests that ignore the end of the sequence, whose
    tokens no mask would allow. Steps with masks follow steps without."""
    script = Script(random)
    load_grammars(script)
    for index in range(7):
        options = script.options()
        if random.random() < 0.55:
            options |= {"grammar": _DEAD_END if random.random() < 0.2 else choose(random)}
        else:
            options |= {"ignore_eos": True}
        script.add(index * random.randint(0, 3), script.prompt(1, 9), random.randint(2, 9), **options)
    return script.scenario(
        (random.choice((28, 96)), 3, random.choice((4, 16))), schedule_conservativeness=random.choice((0.01, 1.0)),
        **script.graphs(2, 3), **script.in_turn(),
    )  # fmt: skip


GRAMMARS = Workload("grammars", "masks from the host for some requests of a step", _grammars, share=3)
