"""Counts for all ranks at once: keys that each rank needs, loads of ranks, and the schedule chosen by them.

Dilated branches are counted in closed form, other patterns from the exact needs of each rank.
"""

from ._loads import MOST_RANKS, SCHEDULES, RankLoads, RankSchedule, ScheduleName, choose_schedule, rank_loads
from ._tokens import KVNeeds
