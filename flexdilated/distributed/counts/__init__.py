"""Counts of the keys that each rank needs and of each rank's load; the choice of exchange or ring by these counts.

Dilated branches with rates that divide their segment lengths and one another are counted in closed form, other patterns
from the exact needs of each rank.
"""

from ._loads import MOST_RANKS, SCHEDULES, RankLoads, RankSchedule, ScheduleName, choose_schedule, rank_loads
from ._tokens import KVNeeds
