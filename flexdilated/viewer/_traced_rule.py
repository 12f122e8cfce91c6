"""Rules in the form that the page evaluates: `mask_mod` traced to a list of elementwise operations, with its tables.

A traced value is the index of a node. Nodes 0, 1 and 2 are the head, the query and the key; every other node is
[operation, operand nodes ...], ["const", number] or ["at", index of a table, index nodes ...]. Equal nodes are shared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch_private import TorchDispatchMode, to_copy, unsafe_view
from ..masks.core import Pattern

MOST_ENTRIES = 1 << 24  # entries of all tables, which the page has in memory
_EXACT = 2**52  # the page computes in doubles; floors of quotients are exact below this

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
_SAME = ("alias", "clone", "detach", "expand", "lift_fresh", "reshape", "squeeze", "unsqueeze", "view", "positive",
         to_copy.__name__, unsafe_view.__name__)  # fmt: skip
_NEW = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")
_SUPPORTED = (
    "integer and boolean arithmetic (+, -, *, **, //, %, <<, >>, abs, minimum, maximum, clamp), comparisons, "
    "&, |, ^, ~, torch.where, and tables indexed by all of their dims"
)


@dataclass
class Program:
    """Nodes of all rules of a page, and the tables that they read."""

    sizes: tuple[int, int, int]  # heads, queries, keys
    nodes: list[list[Any]] = field(default_factory=lambda: [["head"], ["query"], ["key"]])
    tables: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._most = [size - 1 for size in self.sizes]

    def rule(self, pattern: Pattern, num_heads: int, nodes: tuple[int, int, int]) -> int:
        """Node that is true if the pattern allows the pair; nodes: head, query and key."""
        mask_mod = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
        zeros = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(4)]
        with _Recorder(self, list(zip(nodes, zeros[1:], strict=True)), repr(pattern)) as recorder:
            return recorder.node(mask_mod(*zeros))

    def add(self, most: int, *node: Any) -> int:
        """Index of a node, added if new; `most` bounds the magnitude of its values."""
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(list(node))
            self._most.append(most)
        return self._known[node]

    def operation(self, name: str, *operands: int) -> int:
        page_name, most_of = _OPERATIONS[name]
        most = most_of(*(self._most[each] for each in operands))
        if name == "floor_divide" and self.nodes[operands[1]][0] == "const":
            most = self._most[operands[0]] // max(1, self._most[operands[1]]) + 1
        return self.add(most, page_name, *operands)

    def constant(self, value: float | bool) -> int:
        if isinstance(value, float) and not value.is_integer():
            raise UnsupportedError(f"the number {value}")
        return self.add(abs(int(value)), "const", int(value))

    def lookup(self, table: Tensor, indices: list[int]) -> int:
        number = next((n for n, each in enumerate(self.tables) if _are_equal(each, table)), len(self.tables))
        if number == len(self.tables):
            if sum(each.numel() for each in (*self.tables, table)) > MOST_ENTRIES:
                raise ValueError(
                    f"a page holds tables of at most {MOST_ENTRIES:,} entries; got more: take fewer tokens or heads"
                )
            self.tables.append(table)
        return self.add(int(table.long().abs().max()), "at", number, *indices)

    def most(self, node: int) -> int:
        """Bound on the magnitude of a node's values."""
        return self._most[node]

    def require_exact(self, node: int, dtype: torch.dtype) -> None:
        limit = 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, _EXACT)
        if self._most[node] > limit:
            raise UnsupportedError(f"numbers that may exceed {limit:,}")

    def to_data(self) -> dict[str, Any]:
        """Plain data; tables as runs of equal entries."""
        return {"nodes": self.nodes, "tables": [_table_data(table) for table in self.tables]}


class UnsupportedError(Exception):
    """An operation of a rule or reason that the page does not support."""


class _Recorder(TorchDispatchMode):
    """Record each operation on a traced tensor in a program; other operations are only computed."""

    def __init__(self, program: Program, inputs: list[tuple[int, Tensor]], name: str) -> None:
        super().__init__()
        self.program, self.name = program, name
        self.traced = {id(tensor): (node, tensor) for node, tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
        name = func.name().removeprefix("aten::").partition(".")[0]
        name = name if name.endswith("__") else name.removesuffix("_")  # in place
        if name in _NEW or not any(id(each) in self.traced for each in flat):
            return result
        try:
            if not isinstance(result, Tensor):
                raise UnsupportedError("a decision by values")
            if result.dtype.is_floating_point or result.dtype.is_complex:
                raise UnsupportedError(f"{name} in {result.dtype}")
            node = self._node(name, args, kwargs or {}, result)
            self.program.require_exact(node, result.dtype)
        except UnsupportedError as error:
            raise ValueError(f"a page evaluates rules of {_SUPPORTED}; got {error} in {self.name}") from None
        self.traced[id(result)] = node, result
        return result

    def _node(self, name: str, args: Any, options: dict[str, Any], result: Tensor) -> int:
        program = self.program
        if name == "index":
            return self._lookup(*args)
        if name in _SAME and result.numel() == 1:
            node = self.node(args[0])
            return self._truth(node, args[0]) if result.dtype == torch.bool else node
        if name.startswith("clamp"):
            ends = dict(zip(("max",) if name == "clamp_max" else ("min", "max"), args[1:], strict=False)) | options
            return self._clamped(self.node(args[0]), ends.get("min"), ends.get("max"))
        if name in ("__lshift__", "__rshift__"):
            name = {"l": "bitwise_left_shift", "r": "bitwise_right_shift"}[name[2]]
        if name in ("div", "divide") and options.get("rounding_mode") == "floor":
            name = "floor_divide"
        if name == "rsub":
            name, args = "sub", (args[1], args[0])
        if options.get("alpha", 1) != 1:
            raise UnsupportedError(f"{name} with alpha")
        if name not in _OPERATIONS:
            raise UnsupportedError(name)
        if result.dtype == torch.bool:  # bits of booleans are 0 and 1
            name = name.replace("bitwise", "logical")
        nodes = [self.node(each) for each in args]
        if name.startswith("logical") or name == "where":
            truths = [self._truth(node, each) for node, each in zip(nodes, args, strict=True)]
            nodes = [truths[0], *nodes[1:]] if name == "where" else truths
        return program.operation(name, *nodes)

    def _truth(self, node: int, value: Any) -> int:
        """Node of a value as 0 or 1, for operations on booleans."""
        is_bool = value.dtype == torch.bool if isinstance(value, Tensor) else isinstance(value, bool)
        return node if is_bool else self.program.operation("ne", node, self.program.constant(0))

    def _clamped(self, node: int, least: Any, most: Any) -> int:
        node = node if least is None else self.program.operation("maximum", node, self.node(least))
        return node if most is None else self.program.operation("minimum", node, self.node(most))

    def node(self, value: Any) -> int:
        """Node of a traced tensor, or of a number or other single-element tensor as a constant."""
        if id(value) in self.traced:
            return self.traced[id(value)][0]
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UnsupportedError(f"a tensor of shape {tuple(value.shape)} among single pairs")
            value = value.item()
        return self.program.constant(value)

    def _lookup(self, table: Tensor, indices: list[Tensor | None]) -> int:
        if id(table) in self.traced or len(indices) != table.dim() or any(index is None for index in indices):
            raise UnsupportedError("an index of some dims only")
        return self.program.lookup(table, [self.node(index) for index in indices])


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def _table_data(table: Tensor) -> dict[str, Any]:
    values, counts = table.flatten().long().unique_consecutive(return_counts=True)
    return {"shape": list(table.shape), "values": values.tolist(), "counts": counts.tolist()}
