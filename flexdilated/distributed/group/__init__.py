"""The ranks of a mesh: shardings, the check that all ranks make the same call, messages and their counts, shards.

Every rank computes the plans of all ranks, so they first compare their calls; a failing rank raises an error on all.
"""

from ._call import PlainCall, as_promised, check_agreement, empty_rows, values_of, whole_rule
from ._messages import Message, Posted, communicating, post
from ._ranks import Ranks, Role, Traffic, group_of, record, traffic
from ._sharding import ORDERS, Order, Sharding, check_sharding, check_shards, equal_shards, shard, unshard

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
