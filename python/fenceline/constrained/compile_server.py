"""The process that compiles grammars, each as a job of its own (:mod:`fenceline.ipc.forked_jobs`). It loads the library
and the vocabulary once."""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc.forked_jobs import Job, JobLimits, JobResult, Work, serve_jobs

COMPILING = JobLimits(
    cpu_s=5,
    short_cpu_s=0.25,
    wall_s=30.0,
    memory_bytes=1 << 30,
    done="compiled",
    smaller="make it or its lengths smaller, or nest it less deeply",
)


class CompileJob(Job, frozen=True):
    """A grammar to be compiled."""

    spec: GrammarSpec
    max_whitespace: int | None


class VocabularySource(msgspec.Struct, frozen=True):
    """See :func:`fenceline.constrained.compile.make_vocabulary`."""

    tokenizer_json: str
    special_ids: frozenset[int]
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def serve(connection: Connection, num_children: int) -> None:
    """The process's main function: receive a VocabularySource, load the library, send the vocabulary, and compile."""
    serve_jobs(connection, num_children, COMPILING, CompileJob, _begin)


def _begin(message: bytes) -> tuple[bytes, Work[CompileJob]]:
    source = msgspec.msgpack.decode(message, type=VocabularySource)
    from fenceline.constrained.compile import compile_grammar, make_vocabulary

    vocabulary = make_vocabulary(source.tokenizer_json, source.special_ids, source.vocab_size, source.eos_token_ids)

    def compiled(job: CompileJob) -> JobResult:
        notes: list[str] = []
        data = compile_grammar(vocabulary, job.spec, job.max_whitespace, notes.append)
        return JobResult(job.id, data, notes=tuple(dict.fromkeys(notes)))

    return vocabulary.serialize_json().encode(), compiled
