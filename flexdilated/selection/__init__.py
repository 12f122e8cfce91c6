"""Selection: which blocks of keys each block of queries reads, chosen from the data.

`_boxes` knows what a row may choose from, `_pools` and `_scores` how much a block is worth to it, `_choose` picks;
`_select_op` is all of it in one op, `_selector` the module. `_selected_attention` attends to what is chosen, and
`_distill` teaches a module to choose; `_selected_cache` does so token by token. `recipes` has what was published, by
name.
"""

from . import recipes
from ._choose import Threshold, TopK, TopP
from ._pools import Pools
from ._selected_attention import SelectedAttention
from ._selector import BlockSelector, Selection
