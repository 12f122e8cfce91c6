"""Run a module's original forward with `scaled_dot_product_attention` replaced by `attend`: for timm and diffusers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..._attend import attend
from ...masks import Mixture, Pattern
from ._rule import Converted, GivenPattern, check_lengths, class_name, pattern_of_call


class ScaledDotProduct(Converted):
    """Converted module that runs its original forward with `scaled_dot_product_attention` replaced by `attend`."""

    other_backends: ClassVar[str] = ""  # remedy in the error, where the module calls another function

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return the result of the original forward, with attention by the pattern.

        Raises ValueError if that forward does not call `scaled_dot_product_attention`.
        """
        assert self._flexdilated is not None
        served = _AttendMode(self._flexdilated, self.call_pattern(*args, **options))
        with served:
            out = super().forward(*args, **options)
        if not served.calls:
            raise ValueError(
                f"{self._flexdilated.label} did not call scaled_dot_product_attention, which convert replaces: "
                f"{class_name(self.original)} cannot be converted with these settings; {self.other_backends}give "
                "convert a function that returns None for it"
            )
        return out

    def call_pattern(self, *args: Any, **options: Any) -> Pattern | Mixture:
        """Return the pattern over all tokens of a call: the pattern that the module was given.

        A subclass whose calls join further tokens to the sequence, such as a text, extends the pattern to them.
        """
        assert self._flexdilated is not None
        return self._flexdilated.pattern


class _AttendMode(TorchFunctionMode):
    """Mode that replaces `scaled_dot_product_attention` by `attend` with a pattern; `calls` is the number of calls."""

    def __init__(self, given: GivenPattern, pattern: Pattern | Mixture) -> None:
        super().__init__()
        self.given = given
        self.pattern = pattern
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.unflatten:  # written in Python with a call of super(), which torch.compile cannot trace here
            func = torch.unflatten
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return _attend_by_pattern(self.given, self.pattern, *args, **(kwargs or {}))


def _attend_by_pattern(
    given: GivenPattern,
    pattern: Pattern | Mixture,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    check_lengths(given, query.shape[2], key.shape[2])
    if not is_causal:  # in causal order, the first tokens of a grid are a sequence that may grow
        given.check_grid(min(query.shape[2], key.shape[2]))
    shape = (query.shape[0], query.shape[2], key.shape[2])
    rule = pattern_of_call(pattern, attn_mask, shape, is_causal=is_causal)
    return attend(query, key, value, rule, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
