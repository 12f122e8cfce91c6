"""What was built is kept: plans, block tables and programs, in bounded memory."""

from ._cache import cache
from ._cache_stats import CacheStats
from ._cache_store import BYTES_VARIABLE, ENTRIES_VARIABLE, bytes_from_environment, entries_from_environment
from ._debug_log import ByteSize, DeferredLog, PatternText, debug_wanted, in_line, log
