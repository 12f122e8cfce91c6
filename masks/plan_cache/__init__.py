"""Cache of plans, block tables and programs, in bounded memory."""

from ._cache import cache
from ._cache_stats import (
    BYTES_VARIABLE,
    ENTRIES_VARIABLE,
    CacheStats,
    bytes_from_environment,
    debug_wanted,
    entries_from_environment,
    in_line,
    log,
    pattern_text,
)
