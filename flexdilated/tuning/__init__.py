"""What this machine computes fastest, measured and kept."""

from ._tune import Inputs, Trialled, Trials, autotune, keep, measure, measure_options
from ._tune_machine import KINDS, measure_machine
