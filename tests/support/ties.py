"""A watch for derivatives through ties, where which operand gets the gradient is torch's choice, and may change."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NoTies(TorchDispatchMode):
    """Raises AssertionError where an operation that bends at a tie meets one while autograd records it.

    Since torch 2.14 the gradient of a clamp at its bound is 0 and no longer 1; others may follow. The watch sees what
    functions of Python and of C++ come down to, in place or not; within a custom op only if it is entered there.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name in _TIES and torch.is_grad_enabled():
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            if any(isinstance(x, Tensor) and x.requires_grad for x in given.values()):
                with torch.no_grad():
                    is_tied = _TIES[name](**given)
                assert not is_tied, f"{name} has a gradient through a tie"
        return func(*args, **kwargs)


def tied(*shape: int, seed: int, **options: Any) -> Tensor:
    """Numbers of -1, 0 and 1; a third of the lines of the last dim are 0, or repeat the line before them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, shape, generator=generator).to(**{"dtype": torch.float64, **options})
    kind = torch.randint(6, shape[:-1], generator=generator)[..., None]
    return torch.where(kind == 0, 0.0, torch.where(kind == 1, x.roll(1, -2), x)).requires_grad_()


def _at(*bounds: str, fixed: Sequence[float] = ()) -> Callable[..., bool]:
    def is_tied(self: Tensor, **given: Any) -> bool:
        listed = [*fixed, *(given[name] for name in bounds if given.get(name) is not None)]
        return any(bool((self == bound).any()) for bound in listed)

    return is_tied


def _pairs(self: Tensor, other: Tensor, **_: Any) -> bool:
    return bool((self == other).any())


def _ends(*reductions: Callable[..., Tensor]) -> Callable[..., bool]:
    def is_tied(self: Tensor, dim: Any = (), other: Tensor | None = None, **_: Any) -> bool:
        if other is not None:
            return _pairs(self, other)
        dims = [dim] if isinstance(dim, int) else list(dim or range(self.dim()))
        found = (self == reduce(self, dims, keepdim=True) for reduce in reductions if self.numel() and dims)
        return any(bool((at.sum(dims) > 1).any()) for at in found)

    return is_tied


def _anywhere(self: Tensor, dim: int = -1, **_: Any) -> bool:
    return bool((self.sort(dim).values.diff(dim=dim) == 0).any()) if self.dim() else False


_TIES: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _at("min", "max")),
    **dict.fromkeys(("relu", "abs", "leaky_relu"), _at(fixed=[0.0])),
    "hardtanh": _at("min_val", "max_val"),
    "threshold": _at("threshold"),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), _pairs),
    **dict.fromkeys(("amax", "max"), _ends(torch.amax)),
    **dict.fromkeys(("amin", "min"), _ends(torch.amin)),
    "aminmax": _ends(torch.amin, torch.amax),
    **dict.fromkeys(("sort", "topk", "kthvalue", "median", "cummax", "cummin"), _anywhere),
}
