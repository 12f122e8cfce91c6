"""Custom patterns: any FlexAttention mask_mod as a set pattern, identified by its code and captured values."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.overrides import TorchFunctionMode
from torch.serialization import add_safe_globals

from ..._torch_private import tree_leaves
from ..core import (
    EMPTY,
    FULL,
    PARTIAL,
    Bounds,
    Box,
    MaskMod,
    Pair,
    Pattern,
    Phrase,
    Reason,
    advises,
    device_kind,
    instead_of_pattern,
    pattern_kind,
    renamed,
    require_int,
)
from ._function_identity import copy_and_digest

Grid = tuple[Tensor, ...]  # (b, h, q, k), which broadcast to the grid
Classify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

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


@dataclass(eq=False)
class CustomRule:
    """A checked mask_mod with its optional `classify` and `period`; there is one live object for each digest.

    digest: identifies code, captured values and period. function, classify: copies on the CPU; classify may be None.
    period: shift of query and key that leaves the result unchanged, or None. uses_head: the result depends on the head.
    covers_pairs: the result has an entry for every query and key. given: the caller's mask_mod and classify.
    elsewhere: copies of the function on other devices, see `on`.
    """

    digest: str
    function: Any  # a FunctionType, which type checkers take for a method
    classify: Any  # a function or None
    period: int | None
    uses_head: bool
    covers_pairs: bool
    given: tuple[types.FunctionType, types.FunctionType | None]  # pickle looks these up by name
    elsewhere: dict[torch.device, types.FunctionType] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__qualname__.rpartition(".")[2]

    def on(self, device: torch.device) -> types.FunctionType:
        """Return the function with its captured tensors on this device; copies are cached."""
        if device_kind(device).on_host:
            return self.function
        if device not in self.elsewhere:
            self.elsewhere[device], _ = copy_and_digest(self.function, device)
        return self.elsewhere[device]


# Live rules by digest, to which the text of a pattern refers. Patterns and cached plans keep them alive.
_rules: WeakValueDictionary[str, CustomRule] = WeakValueDictionary()
_rules_lock = Lock()


@pattern_kind("custom")
class Custom(Pattern):
    """Pattern that allows a pair iff the mask_mod of `rule` returns True for it.

    `head`: global head that the mask_mod gets in place of the pair's own head; None for the pair's own.
    """

    rule: CustomRule
    head: int | None = None

    def __hash__(self) -> int:
        return hash(self.text)

    def parameters(self) -> dict[str, Any]:
        return {"function": self.rule.digest, **({} if self.head is None else {"head": self.head})}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Pattern:
        """Return the pattern of the function whose digest is data["function"], for the head data["head"] if given.

        Raises ValueError unless a pattern with this function exists in this process.
        """
        digest, head = data.get("function"), data.get("head")
        with _rules_lock:
            rule = _rules.get(digest) if isinstance(digest, str) else None
        if rule is None:
            law = (
                "the text of a custom pattern is valid only while the pattern exists: keep the pattern for as long as "
                "calls and their gradients use the text"
            )
            raise ValueError(f"{law}; no pattern of this process has the function {digest!r:.20}")
        return cls(rule, head)

    def phrase(self) -> Phrase:
        return Phrase(f"custom({self.rule.name}{'' if self.head is None else f', head={self.head}'})")

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        function, covers_pairs = self.rule.on(device), self.rule.covers_pairs
        head = None if self.head is None else torch.tensor(self.head, device=device)
        in_64_bits = device_kind(device).flex_trains  # values computed from positions may exceed int32
        if covers_pairs and head is None and not in_64_bits:
            return function

        def allowed(b, h, q, k):
            q, k = (q.long(), k.long()) if in_64_bits else (q, k)
            found = function(b, h if head is None else head, q, k)
            return found if covers_pairs else found & (q == q) & (k == k)

        return allowed

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        area, classify = box.area, self.rule.classify
        if classify is None or not len(area):
            return Bounds(torch.zeros_like(area), area)
        head = box.head if self.head is None else torch.full_like(box.head, self.head)
        verdict = _classes(self.rule.name, classify, (head, box.q.first, box.q.last, box.k.first, box.k.last))
        return Bounds(torch.where(verdict == FULL, area, 0), torch.where(verdict == EMPTY, 0, area))

    def reason(self, pair: Pair) -> Reason:
        where = f"head {pair.head if self.head is None else self.head}, {pair.the_query} and {pair.the_key}"
        try:
            answer = pair.allowed_by(self)
        except IndexError as error:
            raise ValueError(f"{self!r} must be defined for {where}: {error}") from error
        return Reason(self, answer, f"the function {self.rule.name} says {answer} for {where}")

    def for_head(self, head: int, num_heads: int) -> Pattern:
        fixed = self.head is not None or not self.rule.uses_head
        return self if fixed else Custom(self.rule, head)

    def period(self) -> int | None:
        return self.rule.period

    def __copy__(self) -> Custom:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Custom:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (*self.rule.given, self.rule.period, self.head, self.rule.digest)


@advises(keywords=renamed(fn="mask_mod function f mask_fn"), how="write masks.custom(lambda b, h, q, k: q - k < 64)")
def custom(fn: MaskMod | BlockMask, *, classify: Classify | None = None, period: int | None = None) -> Pattern:
    """Pattern that allows the pairs for which a FlexAttention mask_mod `fn(b, h, q, k)` returns True.

    `fn` gets positions and global heads. To build block lists it is evaluated for every pair, except in blocks where
    other parts of an intersection or `classify` decide all pairs.

    classify: a function (head, q_first, q_last, k_first, k_last) of int64 tensors of shape (n,): n boxes of queries
    q_first to q_last and keys k_first to k_last, ends included. It returns an integer tensor of shape (n,): masks.EMPTY
    (no pair of the box is allowed), masks.FULL (every pair is) or masks.PARTIAL (neither is certain). A wrong EMPTY
    or FULL loses or adds pairs; `flexdilated.testing.check_pattern` finds it.
    period: number of tokens by which query and key can be shifted together without changing the result; 1 if only
    their distance counts, None if unknown.

    A BlockMask is used for its mask_mod only: its block lists and its length are ignored.

    Functions with equal code and equal captured values give equal patterns. Captured values and globals are copied when
    the pattern is built; later changes have no effect. Attributes that `fn` reads of torch, math, operator and
    flexdilated count as constants; other modules, and imports or getattr in its body, raise TypeError, as their values
    cannot be checked. Raises TypeError or ValueError if `fn` is not a plain elementwise function.

    >>> masks.describe(masks.custom(lambda b, h, q, k: (q - k) % 3 == 0), 6).useful_pairs
    12
    """
    takes = "(head, q_first, q_last, k_first, k_last)"
    given = _require_mask_mod(fn), None if classify is None else _require_function("classify", classify, takes)
    if period is not None:
        require_int("period", period, minimum=1)
    copies = [copy_and_digest(function, torch.device("cpu")) for function in given if function is not None]
    digest = "+".join([part for _, part in copies] + ([] if period is None else [f"period {period}"]))
    with _rules_lock:
        known = _rules.get(digest)
    if known is not None:
        return Custom(known)
    function, classes = copies[0][0], copies[1][0] if classify is not None else None
    before = torch.get_rng_state()
    try:
        uses_head, covers_pairs = _check_mask_mod(function, copies[0][1])
    except (TypeError, ValueError):
        torch.set_rng_state(before)  # a function that draws random numbers is rejected; undo its draws
        raise
    rule = CustomRule(digest, function, classes, period, uses_head, covers_pairs, given)
    if classes is not None:
        _check_classify(rule.name, classes)
    if period is not None:
        _check_period(rule, period)
    with _rules_lock:
        return Custom(_rules.setdefault(digest, rule))


def _unpickle(fn: MaskMod, classify: Classify | None, period: int | None, head: int | None, digest: str) -> Pattern:
    pattern = custom(fn, classify=classify, period=period)
    assert isinstance(pattern, Custom)
    if pattern.rule.digest != digest:
        rule = "a pickled custom pattern must find the function it was pickled with"
        raise ValueError(f"{rule}; {pattern.rule.name!r} or what it reads has changed: build the pattern again")
    return Custom(pattern.rule, head)


add_safe_globals([_unpickle])  # torch.load then names the function itself, which the user may add


def _refused(name: str, rule: str, got: str, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"the custom function {name!r} {rule}; {got}")


def _check_period(rule: CustomRule, period: int) -> None:
    """Raise ValueError if results on a small grid change when query and key are shifted by `period` tokens.

    Does nothing if captured tensors are too short for the shifted grid.
    """
    h, t = torch.arange(3, device="cpu")[:, None, None], torch.arange(16, device="cpu")
    b = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        here = rule.function(b, h, t[:, None], t)
        there = rule.function(b, h, t[:, None] + period, t + period)
    except IndexError:
        return
    if not torch.equal(here, there):
        differ = f"its results near position 0 and near {period} differ"
        raise _refused(rule.name, f"must repeat after {period=}, query and key shifted together", differ)


def _require_mask_mod(function: object) -> types.FunctionType:
    """Return `function`, or its mask_mod if it is a BlockMask; it must be a plain Python function of (b, h, q, k).

    Raises TypeError for other values, for other parameters, and for default arguments.
    """
    if isinstance(function, BlockMask):
        function = function.mask_mod
        if function is noop_mask:
            raise TypeError(
                "a BlockMask is used for its mask_mod only, and this one has lists of blocks alone: write "
                "masks.block_list(rows, block=...) with these lists"
            )
    if isinstance(function, types.FunctionType) and (function.__defaults__ or function.__kwdefaults__):
        rule = f"a custom function must have no default arguments, as compilers keep stale ones: write `{_MAKER}`"
        raise TypeError(f"{rule}; got {function.__qualname__!r}")
    return _require_function(
        "a custom function", function, "(b, h, q, k)", f" that captures its other values, as in `{_MAKER}`"
    )


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


class _ReadsValuesError(Exception):
    pass


class _Watch(TorchFunctionMode):
    """Torch function mode that adds "b" or "h" to the set `used` when the tensor b or h enters a computation.

    Raises _ReadsValuesError if code converts tensor values to Python values.
    """

    def __init__(self, b: Tensor, h: Tensor) -> None:
        super().__init__()
        self._watched = {"b": b, "h": h}
        self.used: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS_VALUES:
            raise _ReadsValuesError(f"Tensor.{name}")
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # sizes and devices may be read
            given = tree_leaves((args[1:] if name in _SHAPED_ALIKE else args, kwargs or {}))
            self.used |= {name for name, x in self._watched.items() if any(leaf is x for leaf in given)}
        return result


def _check_mask_mod(function: types.FunctionType, digest: str) -> tuple[bool, bool]:
    """Check that the function is a deterministic, elementwise rule that does not depend on b.

    Returns (True if it uses the head, True if its result has an entry for every query and key). Raises TypeError or
    ValueError otherwise. digest: digest of the function before its first call.
    """
    name, grid = function.__qualname__, _largest_grid(function)
    before = [part.clone() for part in grid]
    with _Watch(grid[0], grid[1]) as watch:
        result = _call(function, grid)
    answers = _over_grid(name, result, grid)
    if "b" in watch.used:
        advice = "for rules that differ between batch entries use run-time tensors, such as masks.mask"
        raise _refused(name, "must not depend on the batch entry b, as all entries share the block lists", advice)
    if not all(map(torch.equal, before, grid)) or copy_and_digest(function, torch.device("cpu"))[1] != digest:
        raise ValueError(f"the custom function {name!r} must not change its arguments or what it captured")
    if not torch.equal(result, _call(function, grid)):
        raise _refused(name, "must be deterministic", "two calls with the same positions differ")
    _check_elementwise(function, grid, answers)
    return "h" in watch.used, (1, 1, *result.shape)[-2:] == answers.shape[-2:]


def _largest_grid(function: types.FunctionType) -> Grid:
    """Return arguments (b, h, q, k) of a mask_mod that broadcast to a grid of batch entries, heads, queries and keys.

    Of a few sizes it is the largest at which the function does not index beyond the end of a captured tensor.
    Positions begin at 0. The grid has two batch entries, and one key fewer than queries if it has over two queries.
    """
    b, h, t = (torch.arange(number, device="cpu") for number in (2, _HEADS[0], _TOKENS[0]))
    grid: Grid = ()
    for tokens, heads in product(_TOKENS, _HEADS):
        grid = b[:, None, None, None], h[:heads, None, None], t[:tokens, None], t[: tokens - (tokens > 2)]
        try:
            function(*(part.clone() for part in grid))
        except IndexError:
            continue
        except Exception:  # the checked call reports it
            pass
        break
    return tuple(part.clone() for part in grid)


def _call(function: types.FunctionType, grid: Grid, kind: str = "") -> Any:
    name = function.__qualname__
    try:
        return function(*grid)
    except _ReadsValuesError as error:
        rule = "must not branch on values of tensors (`if`, `and`, `or`, `a < b < c`)"
        raise _refused(name, f"{rule}: write torch.where, or `&`, `|` and `~`", f"it called {error}") from None
    except Exception as error:
        where = " x ".join(str(part.numel()) for part in grid[1:])
        got = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the custom function {name!r} failed on {where}{kind} heads, queries and keys: {got}"
        ) from error


def _over_grid(name: str, result: Any, grid: Grid) -> Tensor:
    """Return the result of a mask_mod, expanded to the broadcast shape of the grid (b, h, q, k).

    Raises TypeError unless it is a bool tensor, and ValueError unless it broadcasts to this shape. name: name of the
    mask_mod, for errors.
    """
    if not isinstance(result, Tensor):
        raise _refused(name, "must return a bool tensor", f"got {type(result).__name__}", TypeError)
    if result.dtype != torch.bool:
        raise _refused(name, "must return a bool tensor: end with a comparison", f"got {result.dtype}", TypeError)
    shapes = [tuple(part.shape) for part in grid]
    try:
        return result.expand(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        got = f"got {tuple(result.shape)} for shapes {', '.join(map(str, shapes))}"
        raise _refused(name, "must return the broadcast shape of its arguments", got) from None


def _check_elementwise(function: types.FunctionType, grid: Grid, result: Tensor) -> None:
    """Raise ValueError unless further calls give each cell of the grid the value that it has in `result`.

    These calls get the cells shuffled in one dim, single cells, and int32 positions.
    """
    cells = torch.stack([part.flatten() for part in torch.broadcast_tensors(*grid)])
    order = torch.randperm(cells.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    cells, answers = cells[:, order], result.flatten()[order]
    once = "for a grid of positions and for single positions"
    tries = [(once, cells, some) for some in (slice(None), *range(min(_POINTS, len(answers))))]
    for when, given, some in (*tries, ("for int32 positions, which kernels use, and int64", cells.int(), slice(None))):
        given, expected = given[:, some], answers[some]
        found = _call(function, given.unbind(0), " int32" if given.dtype == torch.int32 else "")
        fits = isinstance(found, Tensor) and found.shape in (expected.shape, ())
        differs = (found != expected).flatten().nonzero().flatten().tolist() if fits else [0]
        if differs:
            _, head, query, key = given.reshape(4, -1)[:, differs[0]].tolist()
            rule = f"must decide each pair independently, with equal results {when}"
            differ = f"its results for head {head}, query {query}, key {key} differ"
            raise _refused(function.__qualname__, rule, differ)


def _classes(name: str, classify: Classify, boxes: tuple[Tensor, ...]) -> Tensor:
    """Return the result of `classify` for n boxes: EMPTY, PARTIAL or FULL for each, in an integer tensor of shape (n,).

    boxes: (head, q_first, q_last, k_first, k_last), each of shape (n,). name: name of the mask_mod, for errors. Raises
    TypeError or ValueError for any other result, and ValueError if `classify` raises.
    """
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


def _check_classify(name: str, classify: Classify) -> None:
    first, last = torch.tensor([0, 0, 4, 9], device="cpu"), torch.tensor([0, 3, 7, 15], device="cpu")
    q, k = torch.cartesian_prod(torch.arange(4, device="cpu"), torch.arange(4, device="cpu")).unbind(1)
    boxes = (torch.zeros_like(q), first[q], last[q], first[k], last[k])
    together = _classes(name, classify, boxes)
    alone = [_classes(name, classify, tuple(part[index, None] for part in boxes)) for index in range(len(q))]
    if not torch.equal(together, torch.cat(alone)):
        raise ValueError(
            f"classify of the custom function {name!r} must decide each box independently of the others; it does not"
        )
