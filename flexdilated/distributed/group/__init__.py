"""The ranks of a mesh: shardings, the check that all ranks make the same call, messages and their counts, shards.

Every rank computes the plans of all ranks, so they first compare their calls; a failing rank raises an error on all.
"""

from ._call import PartSums, PlainCall, as_promised, check_agreement, values_of, whole_rule
from ._messages import Posted, communicating, post
from ._ranks import Ranks, Role, Traffic, group_of, record, traffic
from ._sharding import ORDERS, Order, Sharding, check_sharding, check_shards, equal_shards, shard, unshard
