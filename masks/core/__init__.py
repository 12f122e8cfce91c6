"""What every pattern is made of: Pattern, Mixture and Bound, their algebra, boxes and progressions, ranges, checks."""

from ._algebra import And, Every, Not, Or, both, both_bounds, every
from ._ambient import own_modes, plans
from ._bound import EMPTY, FULL, PARTIAL, Bound, Extent
from ._box import Bounds, Box, Counts, Progression, Squares, clip, count_below, count_residue
from ._box_parts import (
    Owned,
    by_size,
    cut_classes,
    distinct_boxes,
    few_at_once,
    halves,
    join,
    look_at_pairs,
    num_classes,
    residue_factors,
)
from ._bytes_text import bytes_text
from ._check import LARGEST, require_below, require_bool, require_choice, require_finite, require_int, shown
from ._composite import Composite, common_period
from ._distances import count_multiples
from ._expression import CONSTRUCTORS, DEEPEST, KINDS, constructor, pattern_kind
from ._pattern import Expression, MaskMod, Mixture, Pattern, require_expression, sum_phrase
from ._per_head import HeadGroups, PerHead, head_groups, per_head
from ._range_union import joined_intervals, ranges_of, union_of
from ._ranges import Ranges, among, as_ranges, intersect, within
from ._reason import Pair, Reason, listing, span
from ._spelling import CALL, CUT, LONGEST, QUOTED, Phrase, call, shortened
from ._tokens_text import tokens_text
