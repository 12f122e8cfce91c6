"""Selection: data-dependent choice of the key blocks that each query block attends to.

`_boxes` finds the candidate blocks of each query block, `_scores` scores them, `_choose` chooses the best. `_select_op`
wraps these steps in one custom op, and `_selector` in a module, `BlockSelector`. `_selected_cache` computes attention
to the chosen blocks, in one pass or in decoding. `_selected_attention` has the module `SelectedAttention`, for one rank
or several, with its distillation loss. `recipes` has published methods; `_index_op` has the custom ops of
`recipes.LightningIndexer`, which chooses single keys.
"""

from . import recipes
from ._choose import Threshold, TopK, TopP
from ._scores import Pools
from ._selected_attention import SelectedAttention
from ._selector import BlockSelector, Selection
