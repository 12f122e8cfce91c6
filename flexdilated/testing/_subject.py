"""A module under test: how it is made and called, and the inputs of one call (a case)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..masks import Mixture, Pattern
from ..masks.core import advises, require_choice, shortened
from ._closeness import DenseAttention, check_result
from ._inputs import KINDS, length_text, values

# B batch, H query heads, G key/value heads, N tokens, D head dim

_ERROR_LINES, LONGEST_LINE = 8, 240  # lines of an error, and characters of a line in a report
Result = Any  # out, or a tuple of which the first is out


def call_module(module: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor) -> Result:
    return module(q, k, v)


@advises()
@dataclass(frozen=True)
class Calls:
    """Functions by which the checks of `examine_attention_module` call a module, with q, k and v in `layout`.

    Each function but over_ranks returns the output in that layout, or a tuple that begins with it. If a function is
    None, the checks that need it do not apply.

    layout: "BHND" (batch, heads, tokens, head dim), "BNHD", or "BNE", in which heads are concatenated, E = H D, as in
        `nn.MultiheadAttention(batch_first=True)`; projections must then be the identity (`identity_projections`). In
        "BHND" and "BNHD" the first further tensor of shape (B, H, N) in the tuple is checked as the natural-log
        log-sum-exp. If N = H none is checked, as weights averaged over heads, (B, N, N), have that shape too.
    plain: (module, q, k, v) -> attention over all tokens.
    padded: (module, q, k, v, hidden); hidden (B, N): True for keys to exclude.
    packed: (module, q, k, v, ids); ids (B, N): ascending number of the document of each position.
    documents: the attention of `packed`: "restart", the pattern begins at position 0 in each document
        (`pattern.per_document(ids)`), or "cut", pairs across documents are excluded (`pattern & masks.documents(ids)`).
    decoded: (module, q, k, v) -> outputs of all tokens, decoded token by token.
    over_ranks: (mesh) -> module for one rank of a one-dimensional DeviceMesh; `plain` calls it with the rank's
        contiguous tokens. Both are pickled, so define them at the top level of a file.

    Raises TypeError or ValueError for other values.

    >>> calls = testing.Calls(plain=lambda module, q, k, v: module(q, k, v))
    """

    layout: Literal["BHND", "BNHD", "BNE"] = "BHND"
    plain: Callable[..., Result] = call_module
    padded: Callable[..., Result] | None = None
    packed: Callable[..., Result] | None = None
    documents: Literal["restart", "cut"] = "restart"
    decoded: Callable[..., Result] | None = None
    over_ranks: Callable[[Any], Callable[..., Result]] | None = None

    def __post_init__(self) -> None:
        require_choice("layout", self.layout, ("BHND", "BNHD", "BNE"))
        require_choice("documents", self.documents, ("restart", "cut"))
        for name in ("plain", "padded", "packed", "decoded", "over_ranks"):
            value = getattr(self, name)
            if not (callable(value) or (value is None and name != "plain")):
                raise TypeError(f"{name} must be a function; got {value!r:.80}")

    def into_layout(self, x: Tensor) -> Tensor:
        if self.layout == "BHND":
            return x
        x = x.transpose(1, 2)
        return x.flatten(2) if self.layout == "BNE" else x

    def out_of_layout(self, x: Tensor, num_heads: int) -> Tensor:
        """Return an output in `layout` as (B, H, N, D), where H is num_heads."""
        if self.layout == "BHND":
            return x
        return (x.unflatten(2, (num_heads, -1)) if self.layout == "BNE" else x).transpose(1, 2)


@advises()
def identity_projections(module: nn.Module) -> nn.Module:
    """Set the projections of a module like `nn.MultiheadAttention` to the identity, without bias, in place; return it.

    With the other defaults of `nn.MultiheadAttention` the module then returns plain attention over its arguments query,
    key and value. It must have out_proj, an nn.Linear, and the parameter in_proj_weight, or q_proj_weight,
    k_proj_weight and v_proj_weight. It may have the parameter in_proj_bias.

    Raises TypeError for a module without the required ones, and ValueError unless query, key and value have equal
    widths.

    >>> layer = testing.identity_projections(torch.nn.MultiheadAttention(64, 4))
    """
    named = dict(module.named_parameters())
    packed, separate = named.get("in_proj_weight"), [named.get(f"{name}_proj_weight") for name in "qkv"]
    weights = [weight for weight in (separate if packed is None else packed.chunk(3)) if weight is not None]
    if len(weights) < 3 or "out_proj.weight" not in named:
        raise TypeError(
            "identity_projections needs the parameters of nn.MultiheadAttention, in_proj_weight, or q_proj_weight and "
            f"so on, and out_proj.weight; got {type(module).__name__} with {sorted(named)}"
        )
    weights.append(named["out_proj.weight"])
    for weight in weights:
        if weight.shape[0] != weight.shape[1]:
            raise ValueError(f"projections must be square to be the identity; got {tuple(weight.shape)}")
    for weight in weights:
        nn.init.eye_(weight.data)
    for name in ("in_proj_bias", "out_proj.bias"):
        if name in named:
            nn.init.zeros_(named[name])
    return module


class Failure(AssertionError):
    """Error of a check that found a wrong result."""


def as_failure(error: Exception) -> Failure:
    """Return a Failure that shows the type and message of an error of the module; a Failure is returned unchanged."""
    if isinstance(error, Failure):
        return error
    return Failure(f"raises {type(error).__name__}: {first_lines(str(error), _ERROR_LINES)}")


def first_lines(text: str, max_lines: int) -> str:
    """Return the first `max_lines` lines, each shortened, and a line with the number of further lines, if any."""
    lines = text.splitlines()
    more = [f"... and {len(lines) - max_lines} more lines"] if len(lines) > max_lines else []
    return "\n".join([*(shortened(line, LONGEST_LINE) for line in lines[:max_lines]), *more])


class DoesNotApply(Exception):
    """Error of a check that does not apply to a module; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of one call of a module under test, and the rows or pairs to check.

    text: describes the case in reports.
    q, k, v: (B, H, N, D) and twice (B, G, N, D).
    pattern: pairs that this call should compute.
    call: name of the function of `Calls` to use, which also gets the tensors `extra`.
    rows: (B, H, N), True for the output rows to check; None: all.
    pairs: (H, N, N), True for pairs that the pattern does not allow, whose keys the check replaces; None in other
        checks.
    modules: objects that a check shares between its cases, such as a module that is called again; empty: the check
        makes new modules.
    """

    text: str
    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern | Mixture
    call: str = "plain"
    extra: tuple[Tensor, ...] = ()
    rows: Tensor | None = None
    pairs: Tensor | None = None
    modules: tuple[Any, ...] = ()

    @property
    def length(self) -> int:
        return self.q.shape[2]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def definition(self) -> DenseAttention:
        return DenseAttention.of(*self.qkv, self.pattern)


@dataclass(frozen=True)
class Subject:
    """A module under test, the pattern that it should compute, and the sizes of its test inputs.

    factory: returns a new module.
    lengths: numbers of tokens to test, ascending.
    seed: of the random values.
    """

    factory: Callable[[], Any]
    pattern: Pattern | Mixture
    calls: Calls
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int

    def case(
        self,
        length: int,
        kind: str = KINDS[0],
        text: str = "",
        *,
        batch: int = 2,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        pattern: Pattern | Mixture | None = None,
        **more: Any,
    ) -> Case:
        """Return a case of `length` tokens, of values that the sizes, dtype, seed and kind (a text in KINDS) fix.

        text: follows the number of tokens in reports.
        dtype, pattern: None: those of the subject.
        more: further fields of the `Case`.
        """
        heads, seed = (self.num_heads, self.num_kv_heads), self.seed + 1_000 * length + KINDS.index(kind)
        drawn = values(kind, *heads, length, self.head_dim, batch=batch, seed=seed)
        q, k, v = (x.to(dtype or self.dtype).to(self.device).requires_grad_(requires_grad) for x in drawn)
        return Case(length_text(length) + text, q, k, v, self.pattern if pattern is None else pattern, **more)

    @property
    def few_lengths(self) -> tuple[int, ...]:
        """At most five of the lengths: up to four that are about evenly spaced, and the longest."""
        step = max(1, len(self.lengths) // 4)
        return tuple(dict.fromkeys((*self.lengths[1::step][:4], self.lengths[-1])))

    def times(self, length: int) -> Tensor:
        """Return the number of the pattern's branches that allow each pair, (H, N, N), at N = length tokens."""
        return self.case(length, batch=1).definition().times()[0]

    def module(self, dtype: torch.dtype | None = None) -> Any:
        """Return a new module; an `nn.Module` is moved to the device and dtype of the subject, or to this dtype.

        Raises TypeError if the factory returns no callable.
        """
        module = self.factory()
        if not callable(module):
            raise TypeError(f"factory must return a callable; got {type(module).__name__}")
        return module.to(device=self.device, dtype=dtype or self.dtype) if isinstance(module, nn.Module) else module

    def copy_of(self, module: Any) -> Any:
        try:
            return copy.deepcopy(module)
        except Exception as error:  # any error of an attribute that cannot be copied
            raise DoesNotApply(f"the module cannot be copied: {type(error).__name__}: {error}") from error

    def run(self, module: Any, case: Case) -> tuple[Tensor, Tensor | None]:
        """Call the module on a case; return (out (B, H, N, D), lse (B, H, N) or None). Any error becomes a Failure."""
        try:
            with torch.no_grad() if case.call == "decoded" else nullcontext():
                return self.output(module, *case.qkv, *case.extra, call=case.call)
        except Exception as error:
            raise as_failure(error) from error

    def output(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor, call: str = "plain"):
        """Call the module; return (out (B, H, N, D), lse (B, H, N) or None). The module's own exceptions are raised.

        q (B, H, N, D), k and v (B, G, N, D): converted to the module's layout. call: name of a function of `Calls`,
        which gets them and the extra tensors. Raises Failure for an output of wrong type, shape, dtype or device.
        torch.compile can trace this method.
        """
        calls = self.calls
        given = calls.into_layout(q)
        result = getattr(calls, call)(module, given, calls.into_layout(k), calls.into_layout(v), *extra)
        first, *others = result if isinstance(result, tuple | list) and result else (result,)
        try:
            out = check_result("the output", first, given.shape, q.device)
        except (AssertionError, TypeError) as error:
            raise Failure(str(error)) from None
        lse = next((x for x in others if isinstance(x, Tensor) and x.shape == q.shape[:3]), None)
        # If N = H, it may be weights averaged over heads, (B, N, N).
        taken = calls.layout != "BNE" and q.shape[1] != q.shape[2]
        return calls.out_of_layout(out, self.num_heads), lse if taken else None
