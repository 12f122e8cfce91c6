"""Cache of plans, block tables and prepared computations, in bounded memory."""

from ._cache import (
    BYTES_VARIABLE,
    ENTRIES_VARIABLE,
    CacheStats,
    bytes_from_environment,
    cache,
    debug_wanted,
    entries_from_environment,
    log,
    pattern_text,
    shortened_line,
)
