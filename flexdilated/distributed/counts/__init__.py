"""What ranks need of each other, counted for all ranks at once and without their plans, and the schedule that follows.

Closed forms for dilated branches, exact needs of each rank for all others.
"""

from ._schedule import (
    Schedule,
    ScheduleChoice,
    choice_of,
    choose_schedule,
    held_in_ring,
    ring_tokens,
)
from ._tokens import KVNeeds, token_counts, tokens_by_chunk, work_of_ranks

__all__ = [
    "KVNeeds",
    "Schedule",
    "ScheduleChoice",
    "choice_of",
    "choose_schedule",
    "held_in_ring",
    "ring_tokens",
    "token_counts",
    "tokens_by_chunk",
    "work_of_ranks",
]
