"""The engines that compute a call's attention, and their shared parts: lse merges, dropout, score_mod, custom ops."""

from ._call import Call
from ._dropout import Dropout, with_seed, without_seed
from ._features import Features
from ._gather import merge_, side_of
from ._merge import WholeRows, add_sinks, merge, sum_dtype, with_padding_keys, with_sinks, with_zero_keys, without_keys
from ._operands import one_width
from ._ops import (
    autograd_on,
    copies,
    functions_in,
    is_transformed,
    no_gradients,
    own_op,
    read_constants,
    refuse_transforms,
    refusing_backward,
    set_gradient,
    tensors_in,
    write_constants,
)
from ._placed_call import PlacedCall, placed_engine
from ._reference import exports_to_onnx, modified_scores, multiplicity, reference_attention
from ._rows import MOST_ROWS, HeadGroup, RuleHeads, branch_rules, group_heads, row_program
from ._run import run
from ._score_mod import ScoreMod, at_offsets, fixed_score_mod, tensors_read, through
from ._tuned import TuningKey, measured_choice, num_measured, results
from .aten import (
    GATHERED_BYTES,
    KernelCalls,
    Program,
    QueryRows,
    SingleKeys,
    Step,
    aten,
    aten_backward,
    in_format_of,
    make_program,
    program_of,
)
from .flex import (
    BACKEND,
    FlexProgram,
    FlexSide,
    FlexStep,
    ListedKeys,
    Portable,
    allowed_on,
    flash_cannot,
    flash_sides,
    flex,
    make_flex_program,
    missing_compiler,
    options_text,
    run_flex,
)
from .kernels._portable import largest_scores
