"""Custom patterns: any FlexAttention mask_mod as a set pattern, identified by its code and captured values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import product
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter
from torch.nn.attention.flex_attention import BlockMask
from torch.serialization import add_safe_globals

from ..._torch_private import graph_constant
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
    Recorded,
    RecordError,
    advises,
    content_digest,
    device_kind,
    instead_of_pattern,
    outside_torch_modes,
    pattern_kind,
    record,
    refused_arguments,
    renamed,
    require_int,
)
from . import _from_block_mask

Places = tuple[Tensor, ...]  # (b, h, q, k), which broadcast to the grid
Classify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_BATCH, _HEAD = 0, 1  # indices of arguments
_GRID_HEADS = (3, 2, 1)  # sizes of the grid for which a mask_mod is checked, see `_largest_grid`
_GRID_TOKENS = (17, 9, 5, 3, 2, 1)
_MOST_SINGLE_CELLS = 40  # of the grid, for which it is also called one by one


@dataclass(eq=False)
class CustomRule:
    """A checked mask_mod with its optional `classify` and `period`.

    digest: identifies the operations and tensors of both functions, and the period.
    recorded, classify: the mask_mod and `classify` as recorded functions with tensors on the CPU; classify may be None.
    period: number of tokens by which query and key can be shifted together without changing the mask_mod's result, or
        None.
    covers_pairs: True if the mask_mod's result has the dims of queries and of keys in full, False if one broadcasts.
    given: the functions of the caller, mask_mod and classify.
    elsewhere: the mask_mod with its tensors on other devices, by device; `on` adds them.
    """

    digest: str
    recorded: Recorded
    classify: Recorded | None
    period: int | None
    covers_pairs: bool
    given: tuple[MaskMod, Classify | None]  # pickle looks these up by name
    elsewhere: dict[torch.device, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return _function_name(self.given[0])

    @property
    def uses_head(self) -> bool:
        """True if the result may depend on the head."""
        return _HEAD in self.recorded.reads

    def on(self, device: torch.device) -> MaskMod:
        """Return the mask_mod with its tensors on this device; it is cached."""
        if device_kind(device).on_host:
            return self.recorded.function
        if device not in self.elsewhere:
            moved = self.recorded.reading([x.to(device) for x in self.recorded.tensors])
            self.elsewhere[device] = moved.function
        return self.elsewhere[device]


# Live rules by digest, to which the text of a pattern refers. Patterns and cached plans keep them alive.
_rules: WeakValueDictionary[str, CustomRule] = WeakValueDictionary()
_rules_lock = Lock()


@pattern_kind("custom")
class Custom(Pattern):
    """Pattern that allows a pair iff the mask_mod of `rule` returns True for it.

    head: global head that the mask_mod gets in place of the pair's own head; None for the pair's own.
    """

    rule: CustomRule
    head: int | None = None

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that the recorded functions read.

        The caller's functions are kept, too, and may hold other copies of these tensors.
        """
        recorded = [each for each in (self.rule.recorded, self.rule.classify) if each is not None]
        return sum(x.nbytes for each in recorded for x in each.tensors)

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
        verdict = _classes_of_boxes(self.rule.name, classify, (head, box.q.first, box.q.last, box.k.first, box.k.last))
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

    `fn` gets positions and global heads. To build block lists, its recorded operations run for every pair, except in
    blocks that `classify` or other parts of the pattern decide, or that `period` makes equal to other blocks.

    classify: a function (head, q_first, q_last, k_first, k_last) of int64 tensors of shape (n,): n boxes of queries
        q_first to q_last and keys k_first to k_last, ends included. It returns an integer tensor of shape (n,):
        masks.EMPTY (no pair of the box is allowed), masks.FULL (every pair is) or masks.PARTIAL (neither is certain). A
        wrong EMPTY or FULL loses or adds pairs; `flexdilated.testing.check_pattern` finds it.
    period: number of tokens by which query and key can be shifted together without changing the result; 1 if only their
        distance counts, None if unknown.

    A BlockMask as `fn` gives the pattern that compiled FlexAttention computes for it. In each batch entry and head,
    partial blocks allow the pairs of the mask_mod, full blocks all pairs, and blocks in no list none. The mask_mod may
    read `b` if the BlockMask has lists for several entries. Lists and lengths are copied. A call with positions beyond
    the lengths raises ValueError, and so does one with another number of heads than the lists, if these are for
    several. A call whose keys end before a block that is listed for one of its queries may raise ValueError. `custom`
    itself raises ValueError for lists that name a block twice or do not fit the lengths, and TypeError for `classify`
    or `period` beside a BlockMask.

    `fn` is called here, and not by later calls of attention: its torch operations are recorded with copies of the
    values that it reads, and later changes of these have no effect. Functions with equal operations, values, `classify`
    and `period` give equal patterns. Raises TypeError or ValueError if `fn` cannot be recorded, reads `b`, does not
    return bool or, on a small grid, does not compute each pair alone, or if `classify` or `period` fails a check of a
    few boxes or pairs. torch.compile cannot record: build the pattern outside of compiled functions.

    >>> masks.describe(masks.custom(lambda b, h, q, k: (q - k) % 3 == 0), 6).useful_pairs
    12
    """
    _refuse_graphs()
    if isinstance(fn, BlockMask):
        if classify is not None or period is not None:
            raise TypeError(
                "a BlockMask takes no classify and no period, as its lists classify its blocks: for its function alone "
                "write masks.custom(block_mask.mask_mod, ...)"
            )
        return _from_block_mask.of_block_mask(fn, custom, _reads_entry, None)
    takes = "(head, q_first, q_last, k_first, k_last)"
    given = (
        _require_function("a custom function", fn, "(b, h, q, k)"),
        None if classify is None else _require_function("classify", classify, takes),
    )
    if period is not None:
        require_int("period", period, minimum=1)
    name, recorded, classes = _function_name(given[0]), _record_on_cpu(given[0], 4), None
    if given[1] is not None:
        classes = _record_on_cpu(given[1], 5, shape=(1,), what=f"classify of the custom function {name!r}")
    digests = [_digest(each) for each in (recorded, classes) if each is not None]
    digest = "+".join(digests + ([] if period is None else [f"period {period}"]))
    with _rules_lock:
        known = _rules.get(digest)
    if known is not None:
        return Custom(known)
    rule = CustomRule(digest, recorded, classes, period, _checked_covers_pairs(name, recorded), given)
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


@graph_constant  # raises while torch.compile traces, also if graphs may break
def _refuse_graphs() -> None:
    if torch.compiler.is_compiling():
        raise TypeError(
            "masks.custom calls a function and records it, which torch.compile cannot trace: build the pattern before, "
            "for example as an attribute of the module"
        )


def _function_name(function: Callable[..., Any]) -> str:
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2]


def _record_on_cpu(function: Callable[..., Any], number: int, shape: tuple[int, ...] = (), what: str = "") -> Recorded:
    """Return the recorded function, with CPU copies of the tensors that it reads.

    number: number of its arguments, int64 tensors of shape `shape`.
    what: what errors call the function; "" for "the custom function" and its name.

    Raises TypeError or ValueError if the function cannot be recorded.
    """
    what = what or f"the custom function {_function_name(function)!r}"
    try:
        with torch.no_grad():
            found = record(function, [torch.int64] * number, torch.device("cpu"), shape=shape)
    except RecordError as error:
        raise error.about(what) from None
    except Exception as error:
        raise ValueError(f"{what} failed: {type(error).__name__}: {error}") from error
    if found.text is None:
        raise TypeError(f"{what} must compute positions by functions of torch, which have a name in every process")
    for x in found.tensors:
        if type(x) not in (Tensor, Parameter, Buffer) or x.layout != torch.strided or x.is_quantized or x.is_meta:
            got = f"a {type(x).__name__} of {x.layout} on {x.device.type}"
            raise TypeError(f"{what} needs plain dense tensors; it reads {got}")
    return found.reading([_cpu_copy(x) for x in found.tensors])


@outside_torch_modes
def _cpu_copy(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _digest(recorded: Recorded) -> str:
    tensors = [[str(x.dtype), list(x.shape), content_digest(x)] for x in recorded.tensors]
    return sha256(json.dumps([recorded.text, tensors]).encode()).hexdigest()


def _rule_error(name: str, rule: str, got: str, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"the custom function {name!r} {rule}; {got}")


def _check_period(rule: CustomRule, period: int) -> None:
    """Raise ValueError if results on a small grid change when query and key are shifted by `period` tokens.

    Does nothing if captured tensors are too small for the heads or positions of this grid.
    """
    h, t = torch.arange(3, device="cpu")[:, None, None], torch.arange(16, device="cpu")
    b = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        here = rule.recorded(b, h, t[:, None], t)
        there = rule.recorded(b, h, t[:, None] + period, t + period)
    except IndexError:
        return
    if not torch.equal(here, there):
        differ = f"its results near position 0 and near {period} differ"
        raise _rule_error(rule.name, f"must repeat after {period=}, query and key shifted together", differ)


def _require_function(what: str, value: object, takes: str) -> Callable[..., Any]:
    if not callable(value):
        raise TypeError(f"{what} must be a function of {takes}; got {type(value).__name__}{instead_of_pattern(value)}")
    given = refused_arguments(value, takes.count(",") + 1)
    if given is not None:
        raise TypeError(f"{what} must take {takes}; got {_function_name(value)!r} with {given}")
    return value


def rules_of_mask_mod(function: MaskMod, entries: int) -> list[Pattern]:
    """Return a list with the pattern of a mask_mod in each of `entries` batch entries.

    It repeats one pattern if the mask_mod does not read b. Raises TypeError or ValueError as `custom` does.
    """
    _refuse_graphs()
    return _from_block_mask.rules_of_mask_mod(function, entries, custom, _reads_entry)


def pattern_of_block_mask(block_mask: BlockMask, entries: int) -> Pattern:
    """Return the pattern of a BlockMask, whose mask_mod may read `b`, for calls of `entries` batch entries.

    The lists must be for `entries` entries, or for a single one; then all entries share these lists. Raises TypeError
    or ValueError as `custom` does.
    """
    _refuse_graphs()
    return _from_block_mask.of_block_mask(block_mask, custom, _reads_entry, entries)


def digest_of_mask_mod(function: MaskMod, entries: int) -> str:
    """Return a digest of a mask_mod's operations and of the values that they read.

    Functions with equal operations and values have equal digests. The digest contains `entries`, the number of batch
    entries of calls, if the function reads b. Raises TypeError or ValueError if the function cannot be recorded.
    """
    recorded = _recorded_mask_mod(function)
    return _digest(recorded) + f" in {entries} entries" * (_BATCH in recorded.reads)


def _reads_entry(function: MaskMod) -> bool:
    """Return True if the result of a mask_mod may depend on the batch entry b."""
    return _BATCH in _recorded_mask_mod(function).reads


def _recorded_mask_mod(function: MaskMod) -> Recorded:
    return _record_on_cpu(_require_function("a custom function", function, "(b, h, q, k)"), 4)


@outside_torch_modes
def _checked_covers_pairs(name: str, recorded: Recorded) -> bool:
    """Return True if the function's result has the dims of queries and of keys in full, False if one broadcasts.

    Raises TypeError or ValueError if the result is not bool or may depend on b, and if calls on a small grid fail or
    show that the function is not elementwise.
    """
    if recorded.dtype != torch.bool:
        raise _rule_error(name, "must return a bool tensor: end with a comparison", f"got {recorded.dtype}", TypeError)
    if _BATCH in recorded.reads:
        advice = "for rules that differ between batch entries use run-time tensors, such as masks.mask"
        raise _rule_error(name, "must not depend on the batch entry b, as all entries share the block lists", advice)
    grid = _largest_grid(recorded)
    result = _call_on_grid(name, recorded, grid)
    answers = _expanded_to_grid(name, result, grid)
    _check_elementwise(name, recorded, grid, answers)
    return (1, 1, *result.shape)[-2:] == answers.shape[-2:]


def _largest_grid(function: MaskMod) -> Places:
    """Return arguments (b, h, q, k) of a mask_mod that broadcast to a grid of batch entries, heads, queries and keys.

    The grid has the largest of a few sizes at which the function does not index beyond the end of a captured tensor, or
    the smallest size if there is none. Positions begin at 0. There are two batch entries, and one key fewer than
    queries if there are over two queries.
    """
    b, h, t = (torch.arange(number, device="cpu") for number in (2, _GRID_HEADS[0], _GRID_TOKENS[0]))
    grid: Places = ()
    for tokens, heads in product(_GRID_TOKENS, _GRID_HEADS):
        grid = b[:, None, None, None], h[:heads, None, None], t[:tokens, None], t[: tokens - (tokens > 2)]
        try:
            function(*(part.clone() for part in grid))
        except IndexError:
            continue
        except Exception:  # the checked call reports it
            pass
        break
    return tuple(part.clone() for part in grid)


def _call_on_grid(name: str, function: MaskMod, grid: Places, kind: str = "") -> Tensor:
    try:
        return function(*grid)
    except Exception as error:
        where = " x ".join(str(part.numel()) for part in grid[1:])
        got = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the custom function {name!r} failed on {where}{kind} heads, queries and keys: {got}"
        ) from error


def _expanded_to_grid(name: str, result: Tensor, grid: Places) -> Tensor:
    """Return the result of a mask_mod, expanded to the broadcast shape of the grid (b, h, q, k).

    Raises ValueError unless it broadcasts to this shape. name: name of the mask_mod, for errors.
    """
    shapes = [tuple(part.shape) for part in grid]
    try:
        return result.expand(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        got = f"got {tuple(result.shape)} for shapes {', '.join(map(str, shapes))}"
        raise _rule_error(name, "must return the broadcast shape of its arguments", got) from None


def _check_elementwise(name: str, function: MaskMod, grid: Places, result: Tensor) -> None:
    """Raise ValueError unless further calls give each cell of the grid the value that it has in `result`.

    These calls get all cells shuffled in one dim, up to 40 single cells, and all cells in int32.
    """
    cells = torch.stack([part.flatten() for part in torch.broadcast_tensors(*grid)])
    order = torch.randperm(cells.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    cells, answers = cells[:, order], result.flatten()[order]
    once = "for a grid of positions and for single positions"
    tries = [(once, cells, some) for some in (slice(None), *range(min(_MOST_SINGLE_CELLS, len(answers))))]
    for when, given, some in (*tries, ("for int32 positions, which kernels use, and int64", cells.int(), slice(None))):
        given, expected = given[:, some], answers[some]
        found = _call_on_grid(name, function, given.unbind(0), " int32" if given.dtype == torch.int32 else "")
        fits = found.shape in (expected.shape, ())
        differs = (found != expected).flatten().nonzero().flatten().tolist() if fits else [0]
        if differs:
            _, head, query, key = given.reshape(4, -1)[:, differs[0]].tolist()
            rule = f"must decide each pair independently, with equal results {when}"
            differ = f"its results for head {head}, query {query}, key {key} differ"
            raise _rule_error(name, rule, differ)


def _classes_of_boxes(name: str, classify: Classify, boxes: tuple[Tensor, ...]) -> Tensor:
    """Return the result of `classify` for n boxes: EMPTY, PARTIAL or FULL for each, in an integer tensor of shape (n,).

    boxes: (head, q_first, q_last, k_first, k_last), each of shape (n,).
    name: name of the mask_mod, for errors.

    Raises TypeError or ValueError for any other result, and ValueError if `classify` raises.
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
    together = _classes_of_boxes(name, classify, boxes)
    alone = [_classes_of_boxes(name, classify, tuple(part[index, None] for part in boxes)) for index in range(len(q))]
    if not torch.equal(together, torch.cat(alone)):
        raise ValueError(
            f"classify of the custom function {name!r} must decide each box independently of the others; it does not"
        )
