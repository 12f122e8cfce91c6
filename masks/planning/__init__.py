"""Planning: choose by predicted cost how to compute a pattern; also build its BlockMask."""

from ._block_mask import (
    block_mask,
    block_sides,
    bound_blocks,
    entry_terms,
    layout,
    snapped,
    term_blocks,
)
from ._candidates import ANYTHING, Allowed, Candidates, Choice, Option, in_each_block_size, takes_mask, way_of
from ._cost import SLOTS_AT_ONCE, OperandSizes, computed_pairs, cost_of
from ._machine import (
    ACCELERATOR,
    CPU,
    FORMAT,
    VERSION,
    BlockRates,
    Machine,
    builtin_machine,
    machine,
    machine_of,
    set_machine,
    sources_in_use,
)
from ._planner import BRANCH_BY_BRANCH, Plan, plan, plan_at, plan_with_table, reads_table, recommended_layout
from .lowering import (
    GATHERED_BYTES,
    CountedPairs,
    IntervalTerm,
    KeyLists,
    PaddedTerm,
    SharedListTerm,
    TableProblems,
    TableTerm,
    Term,
    compact_terms,
    rule_of_joined_entries,
    shared_terms,
    tables_of_heads,
    without_scattered_keys,
)
