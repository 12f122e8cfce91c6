"""Custom patterns: any FlexAttention mask_mod as a set pattern, identified by its code and captured values."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask

from ...core import (
    EMPTY,
    FULL,
    Bounds,
    Box,
    MaskMod,
    Pair,
    Pattern,
    Phrase,
    Reason,
    advises,
    device_kind,
    pattern_kind,
    renamed,
    require_int,
)
from ._function_checks import (
    Classify,
    Traits,
    check_classify,
    check_mask_mod,
    classes_of,
    require_classify,
    require_mask_mod,
)
from ._function_snapshot import snapshot


@dataclass(eq=False)
class CustomRule:
    """A checked function with its classify and period; one object for each digest, so identity is equality."""

    digest: str
    function: Any  # a FunctionType, which type checkers take for a method
    classify: Any  # a function or None
    period: int | None
    traits: Traits
    given: tuple[types.FunctionType, types.FunctionType | None]  # the caller's functions, which pickle looks up by name
    elsewhere: dict[torch.device, types.FunctionType] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__qualname__.rpartition(".")[2]

    def on(self, device: torch.device) -> types.FunctionType:
        """The function with its captured tensors on this device."""
        if device_kind(device).on_host:
            return self.function
        if device not in self.elsewhere:
            self.elsewhere[device], _ = snapshot(self.function, device)
        return self.elsewhere[device]


# Live rules by digest, to which the text of a pattern refers. Patterns and cached plans keep them alive.
_rules: WeakValueDictionary[str, CustomRule] = WeakValueDictionary()
_rules_lock = Lock()


@pattern_kind("custom")
class Custom(Pattern):
    """Allowed iff the function returns True; called for head `head` if that is given."""

    rule: CustomRule
    head: int | None = None

    def __hash__(self) -> int:
        return hash(self.text)

    def parameters(self) -> dict[str, Any]:
        return {"function": self.rule.digest, **({} if self.head is None else {"head": self.head})}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Pattern:
        """The pattern that a text of this process names; ValueError if its function no longer exists."""
        digest, head = data.get("function"), data.get("head")
        with _rules_lock:
            rule = _rules.get(digest) if isinstance(digest, str) else None
        if rule is None:
            law = "a custom pattern lives where it was made: keep it for as long as calls and their gradients use it"
            raise ValueError(f"{law}; no pattern that is alive here has the function {digest!r:.20}")
        return cls(rule, head)

    def phrase(self) -> Phrase:
        return Phrase(f"custom({self.rule.name}{'' if self.head is None else f', head={self.head}'})")

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        mod: MaskMod = self.rule.on(device)
        if not self.rule.traits.covers_pairs:
            mod = _over_pairs(mod)
        if self.head is not None:
            mod = _of_head(mod, torch.tensor(self.head, device=device))
        return _in_64_bits(mod) if device_kind(device).flex_trains else mod

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        area, classify = box.area, self.rule.classify
        if classify is None or not len(area):
            return Bounds(torch.zeros_like(area), area)
        head = box.head if self.head is None else torch.full_like(box.head, self.head)
        verdict = classes_of(self.rule.name, classify, (head, box.q.first, box.q.last, box.k.first, box.k.last))
        return Bounds(torch.where(verdict == FULL, area, 0), torch.where(verdict == EMPTY, 0, area))

    def reason(self, pair: Pair) -> Reason:
        where = f"head {pair.head if self.head is None else self.head}, {pair.the_query} and {pair.the_key}"
        try:
            answer = pair.allowed_by(self)
        except IndexError as error:
            raise ValueError(f"{self!r} has no answer for {where}: {error}") from error
        return Reason(self, answer, f"the function {self.rule.name} says {answer} for {where}")

    def for_head(self, head: int, num_heads: int) -> Pattern:
        fixed = self.head is not None or not self.rule.traits.uses_head
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
    """The pairs for which a FlexAttention mask_mod `fn(b, h, q, k)` is true, over positions and global heads.

    `fn` is evaluated pair by pair where bounds do not decide: everywhere, unless it is in an intersection or has
    `classify(head, q_first, q_last, k_first, k_last)`. `classify` gets int64 tensors of n boxes, queries
    q_first to q_last and keys k_first to k_last, ends included, and returns an integer tensor of n: masks.EMPTY
    (no pair of the box is allowed), masks.FULL (every pair) or masks.PARTIAL (neither is certain). A wrong EMPTY
    or FULL loses or adds pairs; `flexdilated.testing.check_pattern` finds it. `period`: shift of
    query and key together by which the rule repeats, 1 if only their distance counts.

    A BlockMask is used for its mask_mod only: its block lists and its length are ignored.

    Equal code with equal captured values is an equal pattern. What a function captured is copied now; later
    changes have no effect. Raises TypeError or ValueError if `fn` is no plain elementwise rule.

    >>> masks.describe(masks.custom(lambda b, h, q, k: (q - k) % 3 == 0), 6).useful_pairs
    12
    """
    given = require_mask_mod(fn), None if classify is None else require_classify(classify)
    if period is not None:
        require_int("period", period, minimum=1)
    parts = [snapshot(function, torch.device("cpu")) for function in given if function is not None]
    digest = "+".join([part for _, part in parts] + ([] if period is None else [f"period {period}"]))
    with _rules_lock:
        known = _rules.get(digest)
    if known is not None:
        return Custom(known)
    function, classes = parts[0][0], parts[1][0] if len(parts) > 1 else None
    rule = CustomRule(digest, function, classes, period, check_mask_mod(function, parts[0][1]), given)
    if classes is not None:
        check_classify(rule.name, classes)
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


def _check_period(rule: CustomRule, period: int) -> None:
    """Raise ValueError if the function does not repeat on a small grid; no check if captured tensors are too short."""
    h, t = torch.arange(3, device="cpu")[:, None, None], torch.arange(16, device="cpu")
    b = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        here = rule.function(b, h, t[:, None], t)
        there = rule.function(b, h, t[:, None] + period, t + period)
    except IndexError:
        return
    if not torch.equal(here, there):
        claim = f"the custom function {rule.name!r} must repeat after {period=}, query and key shifted together"
        raise ValueError(f"{claim}; its answers near position 0 and near {period} differ")


def _of_head(mod: MaskMod, head: torch.Tensor) -> MaskMod:
    return lambda b, h, q, k: mod(b, head, q, k)


def _in_64_bits(mod: MaskMod) -> MaskMod:
    """Pass int64 positions, as values computed from them may exceed int32."""
    return lambda b, h, q, k: mod(b, h, q.long(), k.long())


def _over_pairs(inner: MaskMod) -> MaskMod:
    """Broadcast the result of a function of the query alone or the key alone to all pairs."""
    return lambda b, h, q, k: inner(b, h, q, k) & (q == q) & (k == k)
