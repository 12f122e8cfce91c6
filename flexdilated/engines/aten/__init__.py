"""The engine "aten": block-sparse attention as calls of ATen's dense attention kernels on tiles of tokens."""

from ._aten_op import aten, aten_backward, program_of
from ._program import Program, Step, in_format_of, make_program
from ._query_rows import QueryRows
from ._single_keys import SingleKeys
from ._tile_blocks import GATHERED_BYTES
from ._tile_calls import KernelCalls
