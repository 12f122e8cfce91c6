"""The engine "tiles": block-sparse attention as calls of ATen's dense attention kernels on tiles of tokens."""

from ._query_rows import QueryRows
from ._tile_blocks import GATHERED_BYTES
from ._tile_calls import KernelCalls
from ._tiles import Program, Step, as_given, make_program
from ._tiles_op import program_of, tiles, tiles_backward
