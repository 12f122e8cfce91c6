"""Cache of plans, block tables and prepared computations, in bounded memory."""

from ._cache import (
    BYTES_VARIABLE,
    ENTRIES_VARIABLE,
    CacheStats,
    bytes_from_environment,
    cache,
    debug_wanted,
    entries_from_environment,
    in_line,
    log,
    pattern_text,
)
