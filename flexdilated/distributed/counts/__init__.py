"""Counts, for all ranks, of the keys that each rank needs and of its load; and the choice of schedule by them.

Dilated branches are counted in closed form, other patterns from the exact needs of each rank.
"""

from ._loads import MOST_RANKS, SCHEDULES, RankLoads, RankSchedule, ScheduleName, choose_schedule, rank_loads
from ._tokens import KVNeeds
