"""Selection: data-dependent choice of the key blocks that each block of queries attends to.

`_boxes` finds the candidate blocks of each row (block of queries), `_scores` scores them, `_choose` chooses the best.
`_select_op` has these steps as one custom op, and `_selector` the module. `_selected_cache` attends to a choice, in one
pass or token by token; `_selected_attention` is the module, also over ranks, with the distillation loss. `recipes` has
published methods.
"""

from . import recipes
from ._choose import Threshold, TopK, TopP
from ._scores import Pools
from ._selected_attention import SelectedAttention
from ._selector import BlockSelector, Selection
