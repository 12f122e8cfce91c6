"""Base types of attention patterns: Pattern, Mixture and Bound, set algebra, boxes, ranges and argument checks.

Also recorded functions, error texts with advice, properties of devices, and suspension of torch's modes.
"""

from ._advice import HEADS, LENGTH, OF_PATTERNS, WIDTH, advises, instead_of_pattern, no_such_name, renamed
from ._algebra import (
    And,
    Composite,
    Every,
    HeadGroups,
    Not,
    OnePart,
    Or,
    PerHead,
    both,
    both_bounds,
    common_period,
    every,
    full,
    head_groups,
    per_head,
)
from ._bound import EMPTY, FULL, PARTIAL, Bound, Extent
from ._box import (
    EXACT_RUNS,
    Bounds,
    Box,
    Counts,
    Progression,
    Squares,
    clip,
    count_below,
    count_between,
    count_multiples,
    count_residue,
    count_runs,
    count_within,
    terms_of_class,
)
from ._box_parts import (
    Owned,
    by_size,
    cut_classes,
    distinct_boxes,
    evaluate_pairs,
    halves,
    in_chunks,
    join,
    num_classes,
    numbered,
    residue_factors,
)
from ._check import (
    CALL,
    CUT,
    LARGEST,
    LONGEST,
    QUOTED,
    Phrase,
    bytes_text,
    call,
    require_below,
    require_bool,
    require_choice,
    require_finite,
    require_int,
    require_ints,
    require_probability,
    round_places,
    seconds_text,
    shortened,
    shown,
    tokens_format,
    tokens_text,
)
from ._devices import TILE, device_kind
from ._expression import CONSTRUCTORS, DEEPEST, KINDS, at_least, constructor, pattern_kind
from ._packages import failed_imports, registered
from ._pattern import (
    Expression,
    MaskMod,
    Mixture,
    Pattern,
    content_digest,
    index_dtype,
    parameters,
    require_expression,
    sum_phrase,
)
from ._ranges import Ranges, among, as_ranges, intersect, joined_intervals, ranges_of, union_of, within
from ._reason import Pair, Reason, listing, span
from ._recorded import Recorded, RecordError, record, refused_arguments
from ._torch_modes import outside_torch_modes, suspended_torch_modes
