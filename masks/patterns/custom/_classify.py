"""classify: what a custom function may say of whole boxes of pairs, and whether the answers have the right form."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import Tensor

from ...core import EMPTY, FULL, PARTIAL

Classify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_SIGNATURE = "(head, q_first, q_last, k_first, k_last)"


def require_classify(classify: object) -> types.FunctionType:
    """The value itself, if it is a plain function of five arguments; TypeError otherwise."""
    if not isinstance(classify, types.FunctionType):
        raise TypeError(f"classify must be a plain function of {_SIGNATURE}; got {type(classify).__name__}")
    code = classify.__code__
    if code.co_argcount != 5 or code.co_kwonlyargcount or code.co_flags & 0x0C:
        names = ", ".join(code.co_varnames[: code.co_argcount])
        raise TypeError(f"classify must take exactly {_SIGNATURE}; got {classify.__qualname__!r} with ({names})")
    return classify


def classes_of(name: str, classify: Classify, boxes: tuple[Tensor, ...]) -> Tensor:
    """The verdicts on n boxes, checked for their form."""
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
    """The form of the verdicts on one box and on several."""
    first, last = torch.tensor([0, 0, 4, 9], device="cpu"), torch.tensor([0, 3, 7, 15], device="cpu")
    q, k = torch.cartesian_prod(torch.arange(4, device="cpu"), torch.arange(4, device="cpu")).unbind(1)
    boxes = (torch.zeros_like(q), first[q], last[q], first[k], last[k])
    together = classes_of(name, classify, boxes)
    alone = [classes_of(name, classify, tuple(part[index, None] for part in boxes)) for index in range(len(q))]
    if not torch.equal(together, torch.cat(alone)):
        raise ValueError(f"classify of the custom function {name!r} must look at each box by itself; it does not")
