"""A description as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ._receptive_field import ReceptiveField

if TYPE_CHECKING:
    from ._describe import BranchDescription, Description


def data_of(told: Description) -> dict[str, Any]:
    """All numbers of a description, for JSON; None for what is not known or has no meaning.

    A receptive field that is not known for all tokens stands under `followed_tokens`.
    """
    field = told.receptive_field() if told.is_self_attention else None
    exact = isinstance(field, ReceptiveField)
    return {
        "pattern": repr(told.pattern),
        "num_queries": told.num_queries,
        "num_keys": told.num_keys,
        "num_heads": told.num_heads,
        "head_dim": told.head_dim,
        "all_pairs": told.all_pairs,
        "useful_pairs": told.useful_pairs,
        "distinct_pairs": told.distinct_pairs,
        "computed_pairs": told.computed_pairs,
        "density": told.density,
        "block_density": told.block_density,
        "waste": told.waste if told.useful_pairs else None,
        "full_blocks": told.full_blocks,
        "partial_blocks": told.partial_blocks,
        "forward_flops": told.forward_flops,
        "backward_flops": told.backward_flops,
        "table_bytes": told.table_bytes,
        "computed": [_computed(branch) for branch in told.branches],
        "branches": [
            {"pattern": repr(each.pattern), "multiplicity": each.multiplicity, "useful_pairs": each.pairs}
            for each in told.branch_shares
        ],
        "heads": [
            {"heads": list(each.heads), "pairs_per_head": each.pairs, "branch_pairs": list(each.branch_pairs)}
            for each in told.heads
        ],
        "multiplicity": told.multiplicity
        and [{"branches": number, "pairs": pairs} for number, pairs in told.multiplicity.items()],
        "gaps": told.gaps and asdict(told.gaps),
        "receptive_field": field.to_data() if field is not None and exact else None,
        "followed_tokens": field.to_data() if field is not None and not exact else None,
    }


def _computed(branch: BranchDescription) -> dict[str, Any]:
    """How one branch, or all of them together, are computed."""
    chosen, *others = ({"layout": option.layout, "predicted_s": option.cost.seconds} for option in branch.options)
    return {
        "pattern": repr(branch.pattern),
        "multiplicity": branch.multiplicity,
        "useful_pairs": branch.useful_pairs,
        "computed_pairs": branch.computed_pairs,
        "full_blocks": branch.full_blocks,
        "partial_blocks": branch.partial_blocks,
        "table_bytes": branch.table_bytes,
        "chosen": chosen,
        "others": others,
    }
