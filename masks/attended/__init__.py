"""Keys that given queries attend to, for context parallelism, decoding and cache eviction."""

from ._ends import Ends, causal_by_form, ends_after, later_pair, regular_ends, seen_ahead
from ._rewrites import KeyQuery, moved
from ._row import FOREVER, Keys, RowSource, SeenKeys, maybe_visible, positions
from ._search import attended_keys, keys_of_any, rules_of_heads
