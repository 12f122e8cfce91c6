"""What this machine computes fastest, measured and kept."""

from ._autotune import autotune, keep
from ._tune import Trialled, Trials, measure, measure_options
from ._tune_machine import KINDS, measure_machine
from ._tune_trial import Inputs
