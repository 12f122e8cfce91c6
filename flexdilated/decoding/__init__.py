"""Caches of the keys and values of past tokens, and attention from new tokens over them."""

from ._cohort import Cohort
from ._held_keys import HeldKeys, refuse_gradients, stay_out_of_graphs
from ._kv_cache import KVCache
from ._reader import Reader
