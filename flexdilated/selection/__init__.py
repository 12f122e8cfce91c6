"""Selection: data-dependent choice of the key blocks that each block of queries attends to.

`_boxes` finds the candidate blocks of each row of queries, `_pools` and `_scores` score them, `_choose` takes the best.
`_select_op` is these steps as one op, and `_selector` the module. `_selected_attention` attends to the chosen blocks
and has the distillation loss; `_selected_cache` does so token by token. `recipes` has published methods by name.
"""

from . import recipes
from ._choose import Threshold, TopK, TopP
from ._scores import Pools
from ._selected_attention import SelectedAttention
from ._selector import BlockSelector, Selection
