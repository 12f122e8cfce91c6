"""What ranks need of each other, counted for all ranks at once: their loads, and the schedule that follows.

Closed forms for dilated branches, exact needs of each rank for all others.
"""

from ._loads import MOST_RANKS, RankLoads, rank_loads
from ._schedule import SCHEDULES, Schedule, ScheduleName, choose_schedule
from ._tokens import KVNeeds

__all__ = [
    "MOST_RANKS",
    "SCHEDULES",
    "KVNeeds",
    "RankLoads",
    "Schedule",
    "ScheduleName",
    "choose_schedule",
    "rank_loads",
]
