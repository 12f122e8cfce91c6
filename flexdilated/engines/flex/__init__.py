"""Engine "flex", calls of FlexAttention with BlockMasks, and engine "portable", plain torch operations."""

from ._flash import flash_cannot, flash_sides
from ._flex import missing_compiler, run_flex
from ._flex_op import allowed_on, flex
from ._kernel_call import BACKEND, on_flash, options_text
from ._listed_keys import ListedKeys
from ._portable_op import portable, portable_gradients
from ._portable_run import Portable
from ._program import FlexProgram, FlexStep, make_flex_program
from ._slots import SideGather as FlexSide
from ._traced import allow_gathers_in_graph
