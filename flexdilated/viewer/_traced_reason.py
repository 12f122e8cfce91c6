"""Rules with their reasons for the page: `reason` is run on a traced pair, once for each path through its branches.

A traced reason is a decision tree. An inner node is {"node": a truth value, "yes": a traced reason, "no": another}. A
leaf is {"text": words alternating with nodes of numbers, "parts": indices of the parts of the rule that decide}. The
text is None if the reason needs data that the page does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..masks.core import And, Or, Pair, Pattern, Reason, shortened
from ._traced_rule import Program, UnsupportedError

_MOST_WAYS = 256  # paths through one reason: eight parts, or 256 heads
_MOST_PLACES = 256  # entries of a list that is indexed by a traced number
_LONGEST_PHRASE = 160
_NUMBER = re.compile("\ue000(\\d+)\ue001")  # placeholder of a node's number in a text


def traced_rule(program: Program, written: Pattern, bound: Pattern, num_heads: int) -> dict[str, Any]:
    """A branch as nested plain data: its text, its node, its traced reason, and the parts that the reason names.

    `written` has the names of run-time tensors, `bound` their values; otherwise they are equal.
    """
    return _Rule(program, written, bound, (0, 1, 2), Pair(0, 0, 0, num_heads)).to_data()


class _Rule:
    """A rule and the nodes of its head, query and key; `asked` has their unit, its numbers are unused."""

    def __init__(
        self, program: Program, written: Pattern, bound: Pattern, nodes: tuple[int, int, int], asked: Pair
    ) -> None:
        self.program, self.written, self.bound, self.nodes, self.asked = program, written, bound, nodes, asked
        self.node = program.rule(bound, asked.num_heads, nodes)
        self.parts: dict[tuple[Any, ...], _Rule] = {}
        self._ways = 0

    def to_data(self) -> dict[str, Any]:
        phrase = shortened(self.written.phrase().text, _LONGEST_PHRASE)
        try:
            reason = self._reason()
        except UnsupportedError:
            run = _Run(self, ())
            for part in self.bound.direct_parts() if isinstance(self.bound, And | Or) else ():
                run.part(part, run.pair)
            reason = {"text": None, "parts": run.named}
        parts = [part.to_data() for part in self.parts.values()]
        return {"phrase": phrase, "node": self.node, "reason": reason, "parts": parts}

    def _reason(self, *answers: bool) -> dict[str, Any]:
        """Traced reason for these answers of the first decisions."""
        self._ways += 1
        if self._ways > _MOST_WAYS:
            raise UnsupportedError
        run = _Run(self, answers)
        found = run.said()
        decisions = list(run.decisions.items())
        for depth in reversed(range(len(answers), len(decisions))):
            other = self._reason(*(answer for _, answer in decisions[:depth]), False)
            if other != found:
                found = {"node": decisions[depth][0], "yes": found, "no": other}
        return found


class _Run:
    """One path through a rule's reason: the first decisions are given, later ones are yes."""

    def __init__(self, rule: _Rule, answers: Sequence[bool]) -> None:
        self.rule, self.program = rule, rule.program
        self.answers = answers
        self.decisions: dict[int, bool] = {}
        self.named: list[int] = []
        head, query, key = (_Number(self, node) for node in rule.nodes)
        self.pair = _TracedPair(query, key, head, rule.asked.num_heads, rule.asked.unit, self)  # type: ignore[arg-type]

    def said(self) -> dict[str, Any]:
        try:
            pieces = _NUMBER.split(self.rule.bound.reason(self.pair).text)
        except (UnsupportedError, IndexError):  # an index out of range: no pair takes this path
            return {"text": None, "parts": []}
        text = [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)]
        return {"text": text, "parts": self.named}

    def decide(self, node: int) -> bool:
        place = len(self.decisions)
        return self.decisions.setdefault(node, self.answers[place] if place < len(self.answers) else True)

    def part(self, bound: Pattern, pair: _TracedPair) -> _Rule:
        """The traced rule of a part, for the pair as the part receives it; recorded as named."""
        nodes = (self.node(pair.head), self.node(pair.query), self.node(pair.key))
        parts, at = self.rule.parts, (id(bound), nodes, pair.unit)
        if at not in parts:
            place = next(n for n, each in enumerate(self.rule.bound.direct_parts()) if each is bound)
            written = self.rule.written.direct_parts()[place]
            parts[at] = _Rule(self.program, written, bound, nodes, pair.counted(pair.unit, 0, 0))
        self.named.append(list(parts).index(at))
        return parts[at]

    def node(self, value: Any) -> int:
        return value.node if isinstance(value, _Number) else self.program.constant(int(value))

    def operation(self, name: str, *operands: Any) -> int:
        node = self.program.operation(name, *(self.node(each) for each in operands))
        self.program.require_exact(node, torch.int64)
        return node


@dataclass(frozen=True)
class _TracedPair(Pair):
    run: Any = None

    def reason_of(self, part: Pattern) -> Reason:
        return Reason(part, _Number(self.run, self.run.part(part, self).node, is_truth=True), "")  # type: ignore[arg-type]

    def allowed_by(self, pattern: Pattern) -> Any:
        nodes = tuple(self.run.node(each) for each in (self.head, self.query, self.key))
        return _Number(self.run, self.run.program.rule(pattern, self.num_heads, nodes), is_truth=True)

    def entry(self, table: Tensor, place: Any) -> Any:
        if not len(table):
            raise UnsupportedError
        try:
            node = self.run.program.lookup(table[None], [self.run.node(0), self.run.node(place)])
        except ValueError as error:  # table too large for a page
            raise UnsupportedError from error
        return _Number(self.run, node)


def _does(name: str, *, is_truth: bool = False, turned: bool = False) -> Callable[..., Any]:
    def method(self: _Number, *other: Any) -> _Number:
        operands = (*other, self) if turned else (self, *other)
        return _Number(self.run, self.run.operation(name, *operands), is_truth=is_truth)

    return method


class _Number:
    """Traced number or truth value; supports the arithmetic, branches and formatting of reasons."""

    def __init__(self, run: _Run, node: int, *, is_truth: bool = False) -> None:
        self.run, self.node, self.is_truth = run, node, is_truth

    __add__, __radd__ = _does("add"), _does("add", turned=True)
    __sub__, __rsub__ = _does("sub"), _does("sub", turned=True)
    __mul__, __rmul__ = _does("mul"), _does("mul", turned=True)
    __floordiv__, __mod__ = _does("floor_divide"), _does("remainder")
    __neg__, __abs__ = _does("neg"), _does("abs")
    __eq__, __ne__ = _does("eq", is_truth=True), _does("ne", is_truth=True)  # type: ignore[assignment]
    __lt__, __le__ = _does("lt", is_truth=True), _does("le", is_truth=True)
    __gt__, __ge__ = _does("gt", is_truth=True), _does("ge", is_truth=True)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __bool__(self) -> bool:
        return self.run.decide(self.node if self.is_truth else self.run.operation("ne", self, 0))

    def __index__(self) -> int:
        """The value, by one decision for each possible value; indices of reasons are never negative."""
        most = self.run.program.most(self.node)
        if most <= _MOST_PLACES:
            for value in range(most + 1):
                if self == value:
                    return value
        raise UnsupportedError

    def __str__(self) -> str:
        return str(bool(self)) if self.is_truth else f"\ue000{self.node}\ue001"

    def __format__(self, spec: str) -> str:
        assert not spec, "reasons write whole numbers"
        return str(self)
