"""Checks of mask_mod and classify functions on small grids, with an error for each fault."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.overrides import TorchFunctionMode

from ...._torch_private import tree_leaves
from ...core import EMPTY, FULL, PARTIAL, instead_of_pattern
from ._function_snapshot import snapshot

_MAKER = "def make(window): return lambda b, h, q, k: q - k < window"
_HEADS = (3, 2, 1)
_TOKENS = (17, 9, 5, 3, 2, 1)
_POINTS = 40
# Methods that convert tensor values to Python values: a rule that calls one is not elementwise.
_READS_VALUES = {
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
}

# Functions that use the shape of their first argument, and not its values.
_SHAPED_ALIKE = {
    *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
}

Grid = tuple[Tensor, Tensor, Tensor, Tensor]
Classify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Traits:
    """Results of the checks: whether the rule reads the head, and whether its result has an entry for every pair."""

    uses_head: bool
    covers_pairs: bool


class _ReadsValuesError(Exception):
    pass


class _Watch(TorchFunctionMode):
    """Track the tensors b and h through a function: all tensors computed from them are marked, too."""

    def __init__(self, b: Tensor, h: Tensor) -> None:
        super().__init__()
        self._marked = {"b": [b], "h": [h]}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS_VALUES:
            raise _ReadsValuesError(f"Tensor.{name}")
        result = func(*args, **(kwargs or {}))
        given = _tensors((args[1:] if name in _SHAPED_ALIKE else args, kwargs or {}))
        for marked in self._marked.values():
            if any(_is_one_of(part, marked) for part in given):
                marked += _tensors(result)
        return result

    def reaches(self, name: str, result: Tensor) -> bool:
        return _is_one_of(result, self._marked[name])


def require_mask_mod(function: object) -> types.FunctionType:
    """Return a plain function of (b, h, q, k), or that of a BlockMask; raise TypeError otherwise."""
    if isinstance(function, BlockMask):
        function = function.mask_mod
        if function is noop_mask:
            raise TypeError(
                "a BlockMask is taken for its mask_mod, and this one has lists of blocks alone: give them to "
                "masks.block_list(rows, block=...)"
            )
    if isinstance(function, types.FunctionType) and (function.__defaults__ or function.__kwdefaults__):
        rule = f"a custom function must have no default arguments, as compilers keep stale ones: write `{_MAKER}`"
        raise TypeError(f"{rule}; got {function.__qualname__!r}")
    return _require_function("a custom function", function, "(b, h, q, k)", f", its values captured, as in `{_MAKER}`")


def require_classify(classify: object) -> types.FunctionType:
    """Return the value if it is a plain function of five arguments; raise TypeError otherwise."""
    return _require_function("classify", classify, "(head, q_first, q_last, k_first, k_last)")


def _require_function(what: str, value: object, takes: str, how: str = "") -> types.FunctionType:
    if not isinstance(value, types.FunctionType):
        advice = instead_of_pattern(value) if how and not callable(value) else ""
        raise TypeError(f"{what} must be a plain function of {takes}{how}; got {type(value).__name__}{advice}")
    code = value.__code__
    variable = bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    if variable or code.co_argcount != takes.count(",") + 1 or code.co_kwonlyargcount:
        names = (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *["..."] * variable)
        raise TypeError(f"{what} must take exactly {takes}; got {value.__qualname__!r} with ({', '.join(names)})")
    return value


def check_mask_mod(function: types.FunctionType, digest: str) -> Traits:
    """Evaluate the function on small grids; raise ValueError or TypeError that names the requirement it violates.

    digest: of the function before it was called.
    """
    before = torch.get_rng_state()
    try:
        return _check(function, digest)
    except (TypeError, ValueError):
        torch.set_rng_state(before)  # a function that draws random numbers is rejected; undo its draws
        raise


def _check(function: types.FunctionType, digest: str) -> Traits:
    name, grid = function.__qualname__, _largest_grid(function)
    before = [part.clone() for part in grid]
    with _Watch(grid[0], grid[1]) as watch:
        result = _call(function, grid)
    _check_result(name, result, grid)
    if watch.reaches("b", result):
        rule = f"the custom function {name!r} must not depend on the batch entry b: block lists serve all of them"
        raise ValueError(f"{rule}; for rules by batch entry use run-time tensors, such as masks.documents")
    if not all(map(torch.equal, before, grid)) or snapshot(function, torch.device("cpu"))[1] != digest:
        raise ValueError(f"the custom function {name!r} must not change its arguments or what it captured")
    if not torch.equal(result, _call(function, grid)):
        raise ValueError(f"the custom function {name!r} must be a rule; two calls with the same positions differ")
    _check_elementwise(function, grid, result.expand(_shape(grid)))
    return Traits(watch.reaches("h", result), (1, 1, *result.shape)[-2:] == _shape(grid)[-2:])


def _largest_grid(function: types.FunctionType) -> Grid:
    """Positions from 0 on: the largest grid that captured tensors cover."""
    grid = _grid(_HEADS[0], _TOKENS[0])
    for tokens, heads in product(_TOKENS, _HEADS):
        grid = _grid(heads, tokens)
        try:
            function(*(part.clone() for part in grid))
        except IndexError:
            continue
        except Exception:  # the checked call reports it
            break
        break
    return grid


def _grid(heads: int, tokens: int) -> Grid:
    """Two batch entries, `heads` heads, and unequal numbers of queries and keys if there are more than two tokens."""
    b, h = torch.arange(2, device="cpu"), torch.arange(heads, device="cpu")
    q, k = torch.arange(tokens, device="cpu"), torch.arange(tokens - (tokens > 2), device="cpu")
    return b[:, None, None, None], h[:, None, None], q[:, None], k


def _shape(grid: Grid) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(part.shape for part in grid)))


def _call(function: types.FunctionType, grid: Grid, kind: str = "") -> Any:
    name = function.__qualname__
    try:
        return function(*grid)
    except _ReadsValuesError as error:
        rule = f"the custom function {name!r} must not decide by values of tensors (`if`, `and`, `or`, `a < b < c`)"
        raise ValueError(f"{rule}: write torch.where, or `&`, `|` and `~`; it called {error}") from None
    except Exception as error:
        where = " x ".join(str(part.numel()) for part in grid[1:])
        got = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the custom function {name!r} failed on {where}{kind} heads, queries and keys: {got}"
        ) from error


def _check_result(name: str, result: Any, grid: Grid) -> None:
    rule = f"the custom function {name!r} must return a bool tensor"
    if not isinstance(result, Tensor):
        raise TypeError(f"{rule}; got {type(result).__name__}")
    if result.dtype != torch.bool:
        raise TypeError(f"{rule}: end with a comparison; got {result.dtype}")
    try:
        fits = torch.broadcast_shapes(result.shape, _shape(grid)) == _shape(grid)
    except RuntimeError:
        fits = False
    if not fits:
        shapes = ", ".join(str(tuple(part.shape)) for part in grid)
        got = f"{tuple(result.shape)} for shapes {shapes}"
        raise ValueError(f"the custom function {name!r} must return the broadcast shape of its arguments; got {got}")


def _check_elementwise(function: types.FunctionType, grid: Grid, result: Tensor) -> None:
    """Raise unless answers are equal for shuffled cells in a row, for single cells, and for int32 positions."""
    cells = torch.stack([part.expand(_shape(grid)).flatten() for part in grid])
    order = torch.randperm(cells.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    cells, answers = cells[:, order], result.flatten()[order]
    once = "on a grid of positions at once and one by one"
    _check_same(function, once, cells, answers)
    for index in range(min(_POINTS, len(answers))):
        _check_same(function, once, cells[:, index], answers[index])
    _check_same(function, "for int32 positions, which kernels use, and int64", cells.int(), answers)


def _check_same(function: types.FunctionType, when: str, cells: Tensor, expected: Tensor) -> None:
    b, h, q, k = cells.unbind(0)
    found = _call(function, (b, h, q, k), " int32" if cells.dtype == torch.int32 else "")
    fits = isinstance(found, Tensor) and found.shape in (expected.shape, ())
    differs = (found != expected).flatten().nonzero().flatten().tolist() if fits else [0]
    if differs:
        _, head, query, key = cells.reshape(4, -1)[:, differs[0]].tolist()
        rule = f"the custom function {function.__qualname__!r} must look at each pair by itself"
        got = f"its answers for head {head}, query {query}, key {key} differ"
        raise ValueError(f"{rule} and give the same answer {when}; {got}")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_one_of(tensor: Tensor, marked: list[Tensor]) -> bool:
    return any(tensor is each for each in marked)


def classes_of(name: str, classify: Classify, boxes: tuple[Tensor, ...]) -> Tensor:
    """Classes of n boxes; raises unless they have the required form."""
    head, q_first, q_last, k_first, k_last = boxes
    try:
        verdict = classify(*boxes)
    except Exception as error:
        where = f"queries {int(q_first.min())} to {int(q_last.max())}, keys {int(k_first.min())} to {int(k_last.max())}"
        got = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"classify of the custom function {name!r} failed on {len(head)} boxes, {where}: {got}"
        ) from error
    rule = f"classify of the custom function {name!r} must return an integer tensor with a class for each box"
    if not isinstance(verdict, Tensor) or verdict.is_floating_point() or verdict.dtype == torch.bool:
        raise TypeError(f"{rule}; got {verdict.dtype if isinstance(verdict, Tensor) else type(verdict).__name__}")
    if verdict.shape != head.shape:
        raise ValueError(f"{rule}; got shape {tuple(verdict.shape)} for {len(head)} boxes")
    if bool((verdict < EMPTY).any()) or bool((verdict > FULL).any()):
        choices = f"masks.EMPTY ({EMPTY}), masks.PARTIAL ({PARTIAL}) or masks.FULL ({FULL})"
        raise ValueError(f"{rule}, {choices}; got {verdict.unique().tolist()[:5]}")
    return verdict


def check_classify(name: str, classify: Classify) -> None:
    """Raise unless the classes of boxes have the required form, and are equal for single boxes and several at once."""
    first, last = torch.tensor([0, 0, 4, 9], device="cpu"), torch.tensor([0, 3, 7, 15], device="cpu")
    q, k = torch.cartesian_prod(torch.arange(4, device="cpu"), torch.arange(4, device="cpu")).unbind(1)
    boxes = (torch.zeros_like(q), first[q], last[q], first[k], last[k])
    together = classes_of(name, classify, boxes)
    alone = [classes_of(name, classify, tuple(part[index, None] for part in boxes)) for index in range(len(q))]
    if not torch.equal(together, torch.cat(alone)):
        raise ValueError(f"classify of the custom function {name!r} must look at each box by itself; it does not")
