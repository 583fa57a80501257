"""Makes the serialised form of a compiled grammar smaller: no rule repeats the edges of all rules."""

from __future__ import annotations

from typing import Any

import msgspec

# The library's number for the form that is known here. It changes with every change of the form.
FORMAT = "v16"


class _Edges(msgspec.Struct, forbid_unknown_fields=True):
    """All edges, in the order of the states that they leave: those of state s are ``data_[indptr_[s]:indptr_[s + 1]]``.
    The last number of an edge is the state that it enters."""

    data_: list[tuple[int, int, int]]
    indptr_: list[int]


class _Automaton(msgspec.Struct, forbid_unknown_fields=True):
    edges: _Edges
    edge_aux_data: msgspec.Raw
    edge_num: int


class _RuleAutomaton(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The states of one rule: those that can be reached from ``start``. ``ends`` may contain others too."""

    automaton: msgspec.Raw
    start: int
    ends: list[int]
    is_dfa: bool
    edge_num: int


def compact(data: str) -> bytes:
    """A smaller serialised form of the same grammar. ``data`` is what :meth:`xgrammar.CompiledGrammar.serialize_json`
    returns.

    In a compiled grammar the automata of all rules lie in one, which the rules share. In the serialised form each rule
    has a copy of it, and what is read back keeps these copies: with 300 rules 6 MB, almost all of which no rule can
    reach. Here each rule keeps only the edges that it can reach. The states keep their numbers, so a rule still has an
    entry, without edges, for every state before its own; and each rule still has a copy of the lists that some edges
    refer to (``edge_aux_data``).

    A form other than :data:`FORMAT`, or with unknown fields, is returned as it is.
    """
    try:
        return _compact(data)
    except (msgspec.DecodeError, KeyError):
        return data.encode()


def _compact(data: str) -> bytes:
    whole: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    if msgspec.json.decode(whole["__VERSION__"]) != FORMAT:
        return data.encode()
    grammar: dict[str, Any] = msgspec.json.decode(whole["grammar"], type=dict[str, msgspec.Raw])
    shared = bytes(grammar["complete_fsm"])
    automaton = msgspec.json.decode(shared, type=_Automaton)
    # A rule's entry is the automaton and two sizes.
    rules = msgspec.json.decode(grammar["per_rule_fsms"], type=list[list[_RuleAutomaton | int]])
    for rule in rules:
        for part in rule:
            if isinstance(part, _RuleAutomaton) and bytes(part.automaton) == shared:
                own = _reachable(automaton, part.start, part.ends)
                part.automaton = msgspec.Raw(msgspec.json.encode(own))
                part.edge_num = own.edge_num
    grammar["per_rule_fsms"] = rules
    whole["grammar"] = grammar
    return msgspec.json.encode(whole)


def _reachable(automaton: _Automaton, start: int, ends: list[int]) -> _Automaton:
    """The part of ``automaton`` that can be reached from the state ``start``, with entries up to the last of ``ends``,
    which the library expects to be states even if nothing reaches them."""
    edges, begins = automaton.edges.data_, automaton.edges.indptr_
    states, left = {start}, [start]
    while left:
        state = left.pop()
        for _, _, target in edges[begins[state] : begins[state + 1]]:
            if target not in states:
                states.add(target)
                left.append(target)
    first = min(states)
    own, own_begins = [], [0] * (first + 1)
    for state in range(first, max([*states, *ends]) + 1):
        if state in states:
            own += edges[begins[state] : begins[state + 1]]
        own_begins.append(len(own))
    return _Automaton(_Edges(own, own_begins), automaton.edge_aux_data, len(own))
