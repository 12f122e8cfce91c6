"""Features of a call, apart from its pattern and sizes: one value from the public functions down to the kernels."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int32
from torch import Tensor

from ._dropout import Dropout
from ._score_mod import ScoreMod


class Features(NamedTuple):
    """Features of a call of attention, apart from its pattern and sizes.

    scale: factor on the scores.
    score_mod: None for none. Public functions of attention pass a result of `fixed_score_mod`; engines may put a plain
        function of the same arguments in its place, such as one over a term's slots.
    sinks: a logit for each query head of q, or None.
    dropout_p: probability of dropping an attention weight.
    seed: seed of dropout, drawn after the engine is chosen; None before, and without dropout.
    return_lse: if False, the lse of the result may be None.
    kernel_options: options of flex_attention as JSON, from `options_text`; "" for none.
    """

    scale: float
    score_mod: ScoreMod | None = None
    sinks: Float[Tensor, " H"] | None = None
    dropout_p: float = 0.0
    seed: Int32[Tensor, "2"] | None = None
    return_lse: bool = True
    kernel_options: str = ""

    @property
    def drops(self) -> bool:
        return self.dropout_p > 0

    @property
    def dropout(self) -> Dropout | None:
        if not self.drops:
            return None
        assert self.seed is not None
        return Dropout(self.dropout_p, self.seed)

    def with_dropout(self, dropout: Dropout | None) -> Features:
        """Return these features with `dropout` in place of their own; without dropout if it is None."""
        p, seed = (0.0, None) if dropout is None else dropout
        return self._replace(dropout_p=p, seed=seed)
