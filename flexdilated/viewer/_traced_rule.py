"""Trace rules and their reasons to data that the page evaluates in the browser.

`mask_mod` is traced to a list of elementwise operations, with its tables. A traced value is the index of a node. Nodes
0, 1 and 2 are the head, the query and the key; every other node is [operation, operand nodes ...], ["const", number] or
["at", index of a table, index nodes ...]. Equal nodes are shared.

`reason` is run on a traced pair, once for each path through its conditions. A traced reason is a decision tree. An
inner node is {"node": a truth value, "yes": a traced reason, "no": another}. A leaf is {"text": words alternating with
nodes of numbers, "parts": indices of the parts of the rule that decide}. The text is None if the reason needs data that
the page does not have.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch_private import TorchDispatchMode, to_copy, unsafe_view
from ..masks.core import And, Or, Pair, Pattern, Reason, shortened

MOST_ENTRIES = 1 << 24  # entries of all tables, which the page has in memory
_EXACT = 2**52  # the page computes in doubles; floors of quotients are exact below this
_MOST_PATHS = 256  # paths through one reason: eight parts, or 256 heads
_MOST_PLACES = 256  # entries of a list that is indexed by a traced number
_LONGEST_PHRASE = 160
_NUMBER = re.compile("\ue000(\\d+)\ue001")  # placeholder of a node's number in a text

# torch's name of an operation -> (the page's name, maximum magnitude of the result from the operands' magnitudes)
_OPERATIONS: dict[str, tuple[str, Callable[..., int]]] = {
    "add": ("add", operator.add),
    "sub": ("sub", operator.add),
    "mul": ("mul", operator.mul),
    "floor_divide": ("div", lambda a, b: a + 1),
    "remainder": ("mod", lambda a, b: b),
    "fmod": ("fmod", lambda a, b: b),
    "pow": ("pow", lambda a, b: a ** min(b, 64)),
    "bitwise_left_shift": ("shift", lambda a, b: a << min(b, 64)),
    "bitwise_right_shift": ("shift_down", lambda a, b: a + 1),
    "minimum": ("min", max),
    "maximum": ("max", max),
    "where": ("where", lambda condition, a, b: max(a, b)),
    "neg": ("neg", int),
    "abs": ("abs", int),
    "bitwise_not": ("bit_not", lambda a: a + 1),
    **{f"bitwise_{name}": (f"bit_{name}", lambda a, b: 2 * max(a, b) + 1) for name in ("and", "or", "xor")},
    **{f"logical_{name}": (name, lambda *operands: 1) for name in ("and", "or", "xor", "not")},
    **{name: (name, lambda a, b: 1) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
# Operations that keep the value of a single element; they may change its type or shape.
_SAME_VALUE = ("alias", "clone", "detach", "expand", "lift_fresh", "reshape", "squeeze", "unsqueeze", "view",
               "positive", to_copy.__name__, unsafe_view.__name__)  # fmt: skip
_NEW_TENSORS = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")
_SUPPORTED = (
    "integer and boolean arithmetic (+, -, *, **, //, %, <<, >>, abs, minimum, maximum, clamp), comparisons, "
    "&, |, ^, ~, torch.where, and tables indexed by all of their dims"
)


@dataclass
class TracedProgram:
    """Traced operations (nodes) of all rules of a page, and the constant tensors (tables) that they index.

    sizes: number of heads, queries and keys.
    nodes: in the form that the head of this file describes.
    """

    sizes: tuple[int, int, int]  # heads, queries, keys
    nodes: list[list[Any]] = field(default_factory=lambda: [["head"], ["query"], ["key"]])
    tables: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._indices: dict[tuple[Any, ...], int] = {}
        self.most = [size - 1 for size in self.sizes]  # bound on the magnitude of each node's values

    def rule(self, pattern: Pattern, num_heads: int, nodes: tuple[int, int, int]) -> int:
        """Return the index of the node that is true if the pattern allows the pair.

        nodes: indices of the nodes of the pair's head, query and key.

        Raises ValueError for operations, numbers and tables that a page does not support.
        """
        mask_mod = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
        zeros = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(4)]
        try:
            with _OperationTracer(self, list(zip(nodes, zeros[1:], strict=True))) as recorder:
                return recorder.node(mask_mod(*zeros))
        except UnsupportedError as error:
            raise ValueError(
                f"a page computes its rule in the browser, from {_SUPPORTED}: write {pattern!r} with these operations "
                f"alone; got {error}"
            ) from None

    def add(self, most: int, *node: Any) -> int:
        """Return the index of `node`, which is added if it is new; most: bound on the magnitude of its values."""
        if node not in self._indices:
            self._indices[node] = len(self.nodes)
            self.nodes.append(list(node))
            self.most.append(most)
        return self._indices[node]

    def operation(self, name: str, *operands: int) -> int:
        page_name, most_of = _OPERATIONS[name]
        most = most_of(*(self.most[each] for each in operands))
        if name == "floor_divide" and self.nodes[operands[1]][0] == "const":
            most = self.most[operands[0]] // max(1, self.most[operands[1]]) + 1
        return self.add(most, page_name, *operands)

    def constant(self, value: float | bool) -> int:
        if isinstance(value, float) and not value.is_integer():
            raise UnsupportedError(f"the number {value}: use integers")
        return self.add(abs(int(value)), "const", int(value))

    def lookup(self, table: Tensor, indices: list[int]) -> int:
        equal = [n for n, each in enumerate(self.tables) if each.dtype == table.dtype and torch.equal(each, table)]
        number = equal[0] if equal else len(self.tables)
        if not equal:
            if sum(each.numel() for each in (*self.tables, table)) > MOST_ENTRIES:
                raise ValueError(
                    f"a page holds tables of at most {MOST_ENTRIES:,} entries; got more: take fewer tokens or heads"
                )
            self.tables.append(table)
        return self.add(int(table.long().abs().max()), "at", number, *indices)

    def require_exact(self, node: int, dtype: torch.dtype) -> None:
        limit = 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, _EXACT)
        if self.most[node] > limit:
            raise UnsupportedError(f"numbers that may exceed {limit:,}: take fewer tokens, or smaller factors")

    def to_data(self) -> dict[str, Any]:
        """Return nodes and tables as a dict for JSON; tables are run-length encoded."""
        return {"nodes": self.nodes, "tables": [_table_data(table) for table in self.tables]}


class UnsupportedError(Exception):
    """Error for a rule or reason that the page does not support."""


class _OperationTracer(TorchDispatchMode):
    """Dispatch mode that computes each operation and, if it reads values of a traced tensor, traces its result, too.

    Operations that read only the shape of a traced tensor, such as zeros_like, are not traced. Raises UnsupportedError
    for operations that a page does not support.

    program: gets the nodes of the traced operations.
    inputs: (node index, tensor) of each tensor to trace.
    """

    def __init__(self, program: TracedProgram, inputs: list[tuple[int, Tensor]]) -> None:
        super().__init__()
        self.program = program
        self.traced = {id(tensor): (node, tensor) for node, tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
        name = func.name().removeprefix("aten::").partition(".")[0]
        name = name if name.endswith("__") else name.removesuffix("_")  # in place
        if name in _NEW_TENSORS or not any(id(each) in self.traced for each in flat):
            return result
        if not isinstance(result, Tensor):
            raise UnsupportedError("a Python decision by a value: use torch.where")
        if result.dtype.is_floating_point or result.dtype.is_complex:
            raise UnsupportedError(f"{name} in {result.dtype}: use integers, such as q // 2 for q / 2")
        node = self._operation_node(name, args, kwargs or {}, result)
        self.program.require_exact(node, result.dtype)
        self.traced[id(result)] = node, result
        return result

    def _operation_node(self, name: str, args: Any, options: dict[str, Any], result: Tensor) -> int:
        program = self.program
        if name == "index":
            return self._lookup_node(*args)
        if name in _SAME_VALUE and result.numel() == 1:
            node = self.node(args[0])
            return self._truth_node(node, args[0]) if result.dtype == torch.bool else node
        if name.startswith("clamp"):
            ends = dict(zip(("max",) if name == "clamp_max" else ("min", "max"), args[1:], strict=False)) | options
            return self._clamped_node(self.node(args[0]), ends.get("min"), ends.get("max"))
        if name in ("__lshift__", "__rshift__"):
            name = {"l": "bitwise_left_shift", "r": "bitwise_right_shift"}[name[2]]
        if name in ("div", "divide") and options.get("rounding_mode") == "floor":
            name = "floor_divide"
        if name == "rsub":
            name, args = "sub", (args[1], args[0])
        if options.get("alpha", 1) != 1:
            raise UnsupportedError(f"{name} with alpha: multiply first")
        if name not in _OPERATIONS:
            raise UnsupportedError(f"the operation {name}")
        if result.dtype == torch.bool:  # bits of booleans are 0 and 1
            name = name.replace("bitwise", "logical")
        nodes = [self.node(each) for each in args]
        if name.startswith("logical") or name == "where":
            truths = [self._truth_node(node, each) for node, each in zip(nodes, args, strict=True)]
            nodes = [truths[0], *nodes[1:]] if name == "where" else truths
        return program.operation(name, *nodes)

    def _truth_node(self, node: int, value: Any) -> int:
        """Return the index of the node for the truth of `value`, traced as `node`: `node` itself if `value` is boolean.

        For numbers it is the node of node != 0.
        """
        is_bool = value.dtype == torch.bool if isinstance(value, Tensor) else isinstance(value, bool)
        return node if is_bool else self.program.operation("ne", node, self.program.constant(0))

    def _clamped_node(self, node: int, least: Any, most: Any) -> int:
        node = node if least is None else self.program.operation("maximum", node, self.node(least))
        return node if most is None else self.program.operation("minimum", node, self.node(most))

    def node(self, value: Any) -> int:
        """Return the index of a traced tensor's node; numbers and other single-element tensors become constants."""
        if id(value) in self.traced:
            return self.traced[id(value)][0]
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UnsupportedError(f"a tensor of shape {tuple(value.shape)} with one pair: index it to one element")
            value = value.item()
        return self.program.constant(value)

    def _lookup_node(self, table: Tensor, indices: list[Tensor | None]) -> int:
        if id(table) in self.traced or len(indices) != table.dim() or any(index is None for index in indices):
            raise UnsupportedError("a table indexed by some of its dims: index all")
        return self.program.lookup(table, [self.node(index) for index in indices])


def _table_data(table: Tensor) -> dict[str, Any]:
    values, counts = table.flatten().long().unique_consecutive(return_counts=True)
    return {"shape": list(table.shape), "values": values.tolist(), "counts": counts.tolist()}


def traced_rule(program: TracedProgram, written: Pattern, bound: Pattern, num_heads: int) -> dict[str, Any]:
    """Trace a branch; return it as a nested dict for JSON.

    The keys are "phrase" (text), "node" (index of the node that is true if the branch allows the pair), "reason" (a
    traced reason), and "parts": a list of such dicts, for the parts of the branch that the reason names. `written` is
    the branch with names of run-time tensors, `bound` the same branch with their values.

    Raises ValueError for operations, numbers and tables that a page does not support.
    """
    return _TracedRule(program, written, bound, (0, 1, 2), Pair(0, 0, 0, num_heads)).to_data()


class _TracedRule:
    """A rule to be traced, with the traced parts that its reason names.

    written, bound: the rule with the names of run-time tensors, and with their values.
    nodes: indices of the nodes of head, query and key.
    plain_pair: a pair with the number of heads and the `unit` of positions of the rule; its positions are not used.
    node: index of the node that is true if the rule allows the pair.
    """

    def __init__(
        self, program: TracedProgram, written: Pattern, bound: Pattern, nodes: tuple[int, int, int], plain_pair: Pair
    ) -> None:
        self.program, self.written, self.bound, self.nodes, self.plain_pair = program, written, bound, nodes, plain_pair
        self.node = program.rule(bound, plain_pair.num_heads, nodes)
        self.parts: dict[tuple[Any, ...], _TracedRule] = {}
        self._num_paths = 0

    def to_data(self) -> dict[str, Any]:
        phrase = shortened(self.written.phrase().text, _LONGEST_PHRASE)
        try:
            reason = self._reason()
        except UnsupportedError:
            path = _Path(self, ())
            for part in self.bound.direct_parts() if isinstance(self.bound, And | Or) else ():
                path.part(part, path.pair)
            reason = {"text": None, "parts": path.named_parts}
        parts = [part.to_data() for part in self.parts.values()]
        return {"phrase": phrase, "node": self.node, "reason": reason, "parts": parts}

    def _reason(self, *answers: bool) -> dict[str, Any]:
        """Return the traced reason, a decision tree over all paths whose first decisions are `answers`.

        Raises UnsupportedError if the rule's reason has more than _MOST_PATHS paths.
        """
        self._num_paths += 1
        if self._num_paths > _MOST_PATHS:
            raise UnsupportedError(f"a reason with more than {_MOST_PATHS} paths")
        path = _Path(self, answers)
        found = path.leaf()
        decisions = list(path.decisions.items())
        for depth in reversed(range(len(answers), len(decisions))):
            other = self._reason(*(answer for _, answer in decisions[:depth]), False)
            if other != found:
                found = {"node": decisions[depth][0], "yes": found, "no": other}
        return found


class _Path:
    """One run of a rule's `reason` on a traced pair, in which every truth value is decided.

    The first decisions are `answers`, later ones True.

    decisions: map from node to decision.
    named_parts: indices of the parts that the reason names.
    """

    def __init__(self, rule: _TracedRule, answers: Sequence[bool]) -> None:
        self.rule, self.program = rule, rule.program
        self.answers = answers
        self.decisions: dict[int, bool] = {}
        self.named_parts: list[int] = []
        head, query, key = (_Number(self, node) for node in rule.nodes)
        self.pair = _TracedPair(query, key, head, rule.plain_pair.num_heads, rule.plain_pair.unit, self)  # type: ignore[arg-type]

    def leaf(self) -> dict[str, Any]:
        try:
            pieces = _NUMBER.split(self.rule.bound.reason(self.pair).text)
        # An index out of range: no pair takes this path. The others: operations that traced numbers do not have.
        except (UnsupportedError, IndexError, TypeError, AttributeError, AssertionError):
            return {"text": None, "parts": []}
        text = [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)]
        return {"text": text, "parts": self.named_parts}

    def decide(self, node: int) -> bool:
        place = len(self.decisions)
        return self.decisions.setdefault(node, self.answers[place] if place < len(self.answers) else True)

    def part(self, bound: Pattern, pair: _TracedPair) -> _TracedRule:
        """Return the traced rule of `bound`, a direct part of this path's rule, and record that the reason names it.

        pair: the traced pair in the coordinates of the part.
        """
        nodes = (self.node(pair.head), self.node(pair.query), self.node(pair.key))
        parts, at = self.rule.parts, (id(bound), nodes, pair.unit)
        if at not in parts:
            place = next(n for n, each in enumerate(self.rule.bound.direct_parts()) if each is bound)
            written = self.rule.written.direct_parts()[place]
            parts[at] = _TracedRule(self.program, written, bound, nodes, pair.counted(pair.unit, 0, 0))
        self.named_parts.append(list(parts).index(at))
        return parts[at]

    def node(self, value: Any) -> int:
        return value.node if isinstance(value, _Number) else self.program.constant(int(value))

    def operation(self, name: str, *operands: Any) -> int:
        node = self.program.operation(name, *(self.node(each) for each in operands))
        self.program.require_exact(node, torch.int64)
        return node


@dataclass(frozen=True)
class _TracedPair(Pair):
    path: Any = None

    def reason_of(self, part: Pattern) -> Reason:
        return Reason(part, _Number(self.path, self.path.part(part, self).node, is_truth=True), "")  # type: ignore[arg-type]

    def allowed_by(self, pattern: Pattern) -> Any:
        nodes = tuple(self.path.node(each) for each in (self.head, self.query, self.key))
        return _Number(self.path, self.path.program.rule(pattern, self.num_heads, nodes), is_truth=True)

    def entry(self, table: Tensor, place: Any) -> Any:
        if not len(table):
            raise UnsupportedError("an empty table")
        try:
            node = self.path.program.lookup(table[None], [self.path.node(0), self.path.node(place)])
        except ValueError as error:  # table too large for a page
            raise UnsupportedError(str(error)) from error
        return _Number(self.path, node)


def _operator(name: str, *, is_truth: bool = False, turned: bool = False) -> Callable[..., Any]:
    def method(self: _Number, *other: Any) -> _Number:
        operands = (*other, self) if turned else (self, *other)
        return _Number(self.path, self.path.operation(name, *operands), is_truth=is_truth)

    return method


class _Number:
    """Traced number or truth value, with the operators, conditions and formatting that reasons use."""

    def __init__(self, path: _Path, node: int, *, is_truth: bool = False) -> None:
        self.path, self.node, self.is_truth = path, node, is_truth

    __add__, __radd__ = _operator("add"), _operator("add", turned=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", turned=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", turned=True)
    __floordiv__, __mod__ = _operator("floor_divide"), _operator("remainder")
    __neg__, __abs__ = _operator("neg"), _operator("abs")
    __eq__, __ne__ = _operator("eq", is_truth=True), _operator("ne", is_truth=True)  # type: ignore[assignment]
    __lt__, __le__ = _operator("lt", is_truth=True), _operator("le", is_truth=True)
    __gt__, __ge__ = _operator("gt", is_truth=True), _operator("ge", is_truth=True)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __bool__(self) -> bool:
        return self.path.decide(self.node if self.is_truth else self.path.operation("ne", self, 0))

    def __index__(self) -> int:
        """Return the number's value on this path: the first of 0, 1, 2 ... for which "equal" is decided to be true.

        Raises UnsupportedError if the value may exceed 256, or if no value is decided to be equal.
        """
        most = self.path.program.most[self.node]
        if most <= _MOST_PLACES:
            for value in range(most + 1):
                if self == value:
                    return value
        raise UnsupportedError(f"an index above {_MOST_PLACES} into a list")

    def __str__(self) -> str:
        return str(bool(self)) if self.is_truth else f"\ue000{self.node}\ue001"

    def __format__(self, spec: str) -> str:
        assert not spec, "reasons write whole numbers"
        return str(self)
