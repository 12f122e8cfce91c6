"""Keys that given queries attend to, for context parallelism, decoding and cache eviction."""

from ._rewrites import KeyQuery, moved
from ._row import FOREVER, Keys, RowSource, Seen, causal_by_form, later_pair, positions, visible
from ._search import attended_keys, keys_of_any, rules_of_heads
