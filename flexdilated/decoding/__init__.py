"""Keys and values of tokens so far, and attention from new ones over them."""

from ._kv_cache import KVCache
