"""The questions, in the order in which they are asked."""

from typing import Any, Protocol, cast

from . import (
    bench_accuracy,
    bench_branch_loop,
    bench_cache,
    bench_catalogue,
    bench_checkpointing,
    bench_choice,
    bench_claims,
    bench_codec,
    bench_compilations,
    bench_computed_pairs,
    bench_decode,
    bench_describe,
    bench_exchange_bytes,
    bench_few_queries,
    bench_first_step,
    bench_fits,
    bench_flex_natural,
    bench_forward,
    bench_linear_time,
    bench_many_documents,
    bench_mask_build,
    bench_memory,
    bench_million_tokens,
    bench_packing,
    bench_plan_lookup,
    bench_planning_collectives,
    bench_pool,
    bench_pool_pays,
    bench_rank_accuracy,
    bench_received,
    bench_ring_memory,
    bench_roofline,
    bench_sweep,
    bench_training,
    bench_work_balance,
)
from ._result import Result


class Question(Protocol):
    """A module that asks one question, its docstring; two frozen configurations; a function to a Result."""

    __doc__: str
    FULL: Any
    SMALL: Any

    def run(self, config: Any) -> Result:
        """Verify, measure, answer."""
        ...


QUESTIONS: dict[str, Question] = {
    name: cast(Question, module)
    for name, module in {
        "C1": bench_forward,
        "C2": bench_flex_natural,
        "C3": bench_training,
        "C4": bench_branch_loop,
        "C5": bench_mask_build,
        "C6": bench_plan_lookup,
        "C7": bench_million_tokens,
        "C8": bench_accuracy,
        "C9": bench_linear_time,
        "C10": bench_decode,
        "C11": bench_compilations,
        "C12": bench_computed_pairs,
        "C13": bench_memory,
        "C14": bench_few_queries,
        "C15": bench_many_documents,
        "D1": bench_exchange_bytes,
        "D2": bench_planning_collectives,
        "D3": bench_rank_accuracy,
        "D4": bench_work_balance,
        "D5": bench_ring_memory,
        "D6": bench_pool,
        "cache": bench_cache,
        "catalogue": bench_catalogue,
        "checkpointing": bench_checkpointing,
        "choice": bench_choice,
        "codec": bench_codec,
        "describe": bench_describe,
        "first_step": bench_first_step,
        "claims": bench_claims,
        "fits": bench_fits,
        "pool": bench_pool_pays,
        "packing": bench_packing,
        "received": bench_received,
        "roofline": bench_roofline,
        "sweep": bench_sweep,
    }.items()
}
