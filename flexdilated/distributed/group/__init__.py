"""Ranks of a mesh, shardings, messages with byte counts, and the check that ranks make equal calls."""

from ._call import (
    PartSums,
    PlainCall,
    check_agreement,
    constant_probability,
    resolved_pattern,
    tensor_digests,
    with_dtype_and_strides_of,
)
from ._messages import Posted, communicating, post, shared_dropout
from ._ranks import Ranks, Role, Traffic, group_of, record, traffic
from ._sharding import ORDERS, Sharding, ShardOrder, check_sharding, check_shards, equal_shards, shard, unshard
