"""The ranks of a mesh: shardings, the check that all ranks make the same call, messages and their counts, shards.

Every rank computes the plans of all ranks, so they first compare their calls; a failing rank raises an error on all.
"""

from ._agreement import check_agreement, values_of
from ._call import PlainCall, as_promised, empty_rows, whole_rule
from ._messages import Message, Posted, communicating, post
from ._ranks import Ranks, group_of
from ._sharding import ORDERS, Order, Sharding
from ._shards import check_sharding, check_shards, equal_shards, shard, unshard
from ._traffic import Role, Traffic, record, traffic

__all__ = [
    "ORDERS",
    "Message",
    "Order",
    "PlainCall",
    "Posted",
    "Ranks",
    "Role",
    "Sharding",
    "Traffic",
    "as_promised",
    "check_agreement",
    "check_sharding",
    "check_shards",
    "communicating",
    "empty_rows",
    "equal_shards",
    "group_of",
    "post",
    "record",
    "shard",
    "traffic",
    "unshard",
    "values_of",
    "whole_rule",
]
