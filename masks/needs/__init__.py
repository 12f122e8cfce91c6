"""Which keys some queries need: for ranks, for decoding, for what a cache may drop."""

from ._asked import Asked, moved
from ._needs import keys_of_any, needed_keys, rules_of_heads
from ._reach import FOREVER, causal_by_form, later_pair, visible
from ._row import Keys, RowSource, Seen, positions
