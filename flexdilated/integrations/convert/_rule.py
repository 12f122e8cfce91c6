"""Common parts of the libraries' files: converted classes, the pattern of a call with its mask, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from tabulate import tabulate
from torch import Tensor, nn

from ..._torch_private import assert_async
from ...masks import Mixture, Pattern, causal, documents, visible_keys
from ...masks import mask as mask_of
from ...masks.core import shortened
from ...masks.patterns import OnGrid
from ...nn import require_causal_mask, without_padding


@dataclass(frozen=True)
class GivenPattern:
    """Settings of a converted module: its name in the model, and its pattern.

    by_name: True if a function chose the pattern for this module; False if one pattern was given for the whole model.
    grid: lengths of the axes of the pattern's largest token grid; () without a grid.
    """

    name: str
    pattern: Pattern | Mixture
    by_name: bool
    grid: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        grids = [leaf.grid for leaf in self.pattern.leaves() if isinstance(leaf, OnGrid)]
        object.__setattr__(self, "grid", max(grids, key=prod, default=()))

    def check_grid(self, num_tokens: int) -> None:
        """Raise ValueError if the pattern's grid has more tokens than a call: the call's tokens are of another grid."""
        if self.grid and num_tokens < prod(self.grid):
            sides = " x ".join(map(str, self.grid))
            raise ValueError(
                f"{self.label} was called with {num_tokens} tokens, and its pattern is for a grid of {sides}: give "
                "convert the grid of these tokens, of an image or video after patching; for cross-attention to a text, "
                "a function that returns None for it"
            )

    @property
    def label(self) -> str:
        """Name of the module in errors; "the model" if the model itself is the attention module, with name ""."""
        return self.name or "the model"


class Converted(nn.Module):
    """Base class of converted modules.

    The class of a converted module is made at run time. It has two bases: `kind`, a subclass of `Converted` with the
    changed methods, and `original`, the module's class before conversion.

    _flexdilated: settings of the module; None for an enclosing module that is converted with its attention but has no
        pattern itself, such as an encoder.
    """

    original: ClassVar[type[nn.Module]]
    kind: ClassVar[type[Converted]]
    _flexdilated: GivenPattern | None

    def extra_repr(self) -> str:
        own = super().extra_repr()
        if self._flexdilated is None:
            return own
        return ", ".join(each for each in (own, shortened(repr(self._flexdilated.pattern))) if each)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return instructions to pickle by (kind, original): pickle cannot find a class made at run time by name."""
        return _new_instance, (self.kind, self.original), self.__getstate__()


def _new_instance(kind: type[Converted], original: type[nn.Module]) -> nn.Module:
    subclass = _subclass(kind, original)
    return subclass.__new__(subclass)


@cache
def _subclass(kind: type[Converted], original: type[nn.Module]) -> type[Converted]:
    names = {"__module__": kind.__module__, "original": original, "kind": kind, "__doc__": original.__doc__}
    return type(f"Converted{original.__name__}", (kind, original), names)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of the module before conversion; its present class if it is not converted."""
    return module.original if isinstance(module, Converted) else type(module)


def replace_class(module: nn.Module, kind: type[Converted], given: GivenPattern | None = None) -> None:
    """Convert a module that is not converted yet: set its class to a subclass of both `kind` and its original class.

    given: settings of the module; None for an enclosing module without a pattern.
    """
    module.__class__ = _subclass(kind, type(module))
    object.__setattr__(module, "_flexdilated", given)


def check_restorable(name: str, module: nn.Module) -> None:
    """Raise ValueError if the class of a converted module was replaced later, as by `fully_shard`.

    name: name of the module in the error.
    """
    if isinstance(module, Converted) and type(module) is not _subclass(module.kind, module.original):
        raise ValueError(
            f"{name} was given another class, {type(module).__name__}, after it was converted: restore its attention "
            "or change its pattern before fully_shard or another function that replaces classes"
        )


def restore_class(module: nn.Module) -> None:
    """Undo the conversion of a module, if it was converted."""
    if isinstance(module, Converted):
        del module._flexdilated
        object.__setattr__(module, "__class__", module.original)


# B batch, H heads, N queries, M keys

_INSTEAD = "give convert another rule as part of the pattern, `pattern & other`"


def pattern_of_call(
    pattern: Pattern | Mixture, mask: Tensor | None, shape: tuple[int, int, int], *, is_causal: bool
) -> Pattern | Mixture:
    """Return the pattern of one call: `pattern`, intersected with the call's mask and, if is_causal, causal order.

    shape: (B, N, M) of the call.
    mask: as `scaled_dot_product_attention` takes it, boolean, True for pairs to keep, or float, -inf for pairs to hide
        and 0 for others; None for no mask.

    A mask must be of one of three kinds. Padding has shape (B or 1, 1, 1, M), or is expanded from it, and its floats
    may also hide keys by the least number of their dtype. A mask that hides padding both as keys and as queries is
    boolean and has shape (B, 1, N, N); in a compiled graph it needs B > 1, and no padding between other tokens. torch's
    causal mask has shape (N, M), with optional leading dims of 1.

    Raises ValueError or TypeError for any other mask; in a compiled graph, RuntimeError at run time for other values.
    """
    batch, num_queries, num_keys = shape
    pattern = pattern & causal() if is_causal else pattern
    if mask is None:
        return pattern
    if mask.dim() == 4 and mask.stride()[1:3] == (0, 0):
        mask = mask[:, :1, :1]
    hidden = ~mask if mask.dtype == torch.bool else mask
    if hidden.dim() == 4 and hidden.shape[1:3] == (1, 1):
        padding = hidden[:, 0, 0].expand(batch, -1)
        if padding.is_floating_point():  # many libraries use the least finite number as -inf
            padding = padding.masked_fill(padding == torch.finfo(padding.dtype).min, -torch.inf)
        return without_padding(pattern, padding, (batch, num_keys))
    if mask.dtype == torch.bool and mask.shape == (batch, 1, num_queries, num_queries):
        real = mask[:, 0].diagonal(dim1=1, dim2=2)
        is_of_tokens = (mask[:, 0] == real[:, :, None] & real[:, None, :]).all()
        is_in_one_piece = ((real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, :1].sum(1) <= 1).all()
        in_one_piece = pattern & documents(real.long() - 1, name="key_padding")
        if batch > 1 and torch.compiler.is_compiling():
            what = "attn_mask must keep the pairs of real tokens, which lie side by side"
            assert_async(is_of_tokens & is_in_one_piece, f"{what}, or {_INSTEAD}")
            return in_one_piece
        if not torch.compiler.is_compiling() and is_of_tokens:
            if is_in_one_piece:
                return in_one_piece
            return (
                pattern & visible_keys(real, name="key_padding") & mask_of(real[:, None, :, None], name="row_padding")
            )
    if hidden.dim() > 2 and set(hidden.shape[:-2]) == {1}:
        hidden = hidden.flatten(0, -2)
    return with_causal_mask(pattern, hidden, (num_queries, num_keys))


def with_causal_mask(pattern: Pattern | Mixture, mask: object, shape: tuple[int, int]) -> Pattern | Mixture:
    """Return the pattern intersected with causal order, after a check that `mask` is torch's causal mask.

    mask: boolean, True for pairs to hide, or float, -inf for pairs to hide and 0 for others.
    shape: (N, M).

    Raises as `require_causal_mask` for any other mask.
    """
    require_causal_mask(mask, shape, instead=_INSTEAD)
    return pattern & causal()


def check_lengths(given: GivenPattern, num_queries: int, num_keys: int) -> None:
    """Raise ValueError if the numbers of queries and keys differ, unless a function chose this module's pattern.

    given: settings of the converted module.
    """
    if num_queries != num_keys and not given.by_name:
        raise ValueError(
            f"{given.label} was called with {num_queries} queries and {num_keys} keys, and a pattern for a whole model "
            "is one of self-attention. Choose by name, such as convert(model, lambda name, module: None if name == "
            f"{given.name!r} else pattern): None leaves it as it was, and a pattern counts queries and keys from 0"
        )


@dataclass(frozen=True, eq=False)
class Candidate:
    """An attention module of a model, and how it can be converted.

    name: name in the model.
    inner: the module whose class is replaced by a subclass of `converted_class`: `module`, a submodule of it, or the
        block around it; None for an unsupported class.
    refusal: the reason why `module` cannot be converted; "" if it can.
    cross_reason: the reason why only a function may choose a pattern for `module`, such as cross-attention; "" if a
        pattern for the whole model applies to it.
    enclosing: enclosing modules whose classes must be replaced too, each with its subclass of `Converted`.
    num_heads: 0 if unknown.
    """

    name: str
    module: nn.Module
    num_heads: int = 0
    inner: nn.Module | None = None
    converted_class: type[Converted] = Converted
    refusal: str = ""
    cross_reason: str = ""
    enclosing: tuple[tuple[nn.Module, type[Converted]], ...] = ()

    @property
    def kind(self) -> str:
        """Top-level package and original class, such as torch.MultiheadAttention."""
        return class_name(original_class(self.module))


def class_name(of: type) -> str:
    """Return a class's name after its top-level package, without submodules, such as torch.MultiheadAttention."""
    return f"{of.__module__.partition('.')[0]}.{of.__qualname__}"


def ancestors(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the modules from `model`, included, down to its submodule `name`, excluded; [] if `name` is ""."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))] if name else []


@dataclass(frozen=True)
class Replaced:
    """A converted attention module: its name in the model, number of heads (0 if unknown), and pattern.

    kind: package and class, such as torch.MultiheadAttention.
    """

    name: str
    kind: str
    num_heads: int
    pattern: Pattern | Mixture


@dataclass(frozen=True)
class Unconverted:
    """An attention module that was not converted: its name in the model, and the reason.

    kind: package and class, such as torch.MultiheadAttention.
    """

    name: str
    kind: str
    reason: str


_IN_PLACE = "convert(model, pattern) changes the model in place, so use the model itself"


@dataclass(frozen=True)
class Report:
    """Result of `convert`: the attention modules that it converted, and those that keep their original attention.

    Both are in the order of `model.named_modules()`. str() gives a table of each that is not empty.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Unconverted, ...]

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """Raise TypeError: the report was called in place of the model."""
        raise TypeError(f"convert returns a report and no model: {_IN_PLACE}")

    if not TYPE_CHECKING:  # type checkers must still find missing names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"the report that convert returns has no {name}: {_IN_PLACE}")

    def __str__(self) -> str:
        done = [(each.name, each.kind, each.num_heads, shortened(repr(each.pattern))) for each in self.replaced]
        rest = [(each.name, each.kind, each.reason) for each in self.left]
        tables = []
        if done:
            tables.append(tabulate(done, ("replaced", "kind", "heads", "pattern"), disable_numparse=True))
        if rest:
            tables.append(tabulate(rest, ("left", "kind", "why"), disable_numparse=True))
        return "\n\n".join(tables) or "no attention module"
