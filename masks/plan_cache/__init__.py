"""What was built is kept: plans, block tables and programs, in bounded memory."""

from ._cache import cache
from ._cache_limits import BYTES_VARIABLE, ENTRIES_VARIABLE, bytes_from_environment, entries_from_environment
from ._cache_stats import CacheStats
from ._debug_log import Sized, Untold, Written, in_line, is_told, log
