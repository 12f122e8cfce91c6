"""Measures the fastest options on this machine, and stores them."""

from ._tune import Inputs, Trialled, Trials, autotune, keep, measure, measure_options
from ._tune_machine import KINDS, measure_machine
