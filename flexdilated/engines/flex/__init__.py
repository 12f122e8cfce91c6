"""The engine of FlexAttention: the terms of a plan as calls with block masks."""

from ._flex import FlexStep, make_flex_program, missing_compiler, run_flex
from ._flex_function import num_flex_functions
from ._flex_op import flex
from ._flex_program import allowed_on
