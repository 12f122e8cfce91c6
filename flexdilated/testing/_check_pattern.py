"""check_pattern: does everything that a pattern says of itself agree with its rule, pair by pair?"""

from __future__ import annotations

import torch

from ..masks import Mixture, Pattern
from ..masks.core._check import require_int
from ..masks.core._pattern import require_expression
from ..masks.patterns.run_time._run_time import names
from ._box_bounds import check_bounds
from ._claims import check_confined, check_for_head, check_period, check_text
from ._dense_rule import DenseRule, check_elementwise
from ._listed_blocks import check_lists


def check_pattern(
    pattern: Pattern | Mixture, *, num_heads: int = 4, max_tokens: int = 96, examples: int = 100, seed: int = 0
) -> None:
    """Hold all that a pattern claims to its `mask_mod`, evaluated densely over positions below `max_tokens`.

    Checked are the bounds of `count` (for custom functions: `classify`) over boxes of one cell, of whole blocks
    and of drawn progressions, as layouts make them; block lists for odd sizes, unequal block sides and several
    layouts; `for_head`; `period` and `confined`, also at positions beyond; and that the pattern's JSON gives
    the pattern back, if it has one. About `examples` boxes are drawn for each pair of steps, from `seed`.

    Raises AssertionError with the smallest counterexample found, ValueError if the pattern does not take
    `num_heads`, if a table in it ends before `max_tokens`, or if it has run-time tensors.
    """
    require_expression(pattern)
    require_int("num_heads", num_heads, minimum=1)
    require_int("max_tokens", max_tokens, minimum=1)
    require_int("examples", examples, minimum=1)
    pattern.check_heads(num_heads)
    if needed := names(pattern):
        raise ValueError(
            "check_pattern draws positions of its own, to which a run-time tensor does not fit: check the pattern "
            f"without it; got one with {', '.join(map(repr, needed))}"
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    parts = tuple(dict.fromkeys(pattern.branches()))
    for part in dict.fromkeys((*parts, Mixture.of(*parts).union)):
        dense = DenseRule.of(part, num_heads, max_tokens)
        check_elementwise(dense, examples, generator)
        check_bounds(dense, examples, generator)
        check_for_head(dense, examples, generator)
        check_period(dense, generator)
        check_confined(dense, generator)
        check_lists(dense, examples, generator)
    check_text(pattern)
