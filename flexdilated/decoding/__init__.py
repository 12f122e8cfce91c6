"""Keys and values of tokens so far, and attention from new ones over them."""

from ._held_keys import HeldKeys, refuse_gradients, stay_out_of_graphs
from ._kv_cache import KVCache
from ._reader import Reader
