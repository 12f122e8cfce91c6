"""Keys that some queries need: for ranks, decoding and cache eviction."""

from ._needs import keys_of_any, needed_keys, rules_of_heads
from ._rewrites import KeyQuery, moved
from ._row import FOREVER, Keys, RowSource, Seen, causal_by_form, later_pair, positions, visible
