"""Measure the fastest way to compute an attention call, and the constants of a device for the cost model."""

from ._tune import autotune, measure_options
from ._tune_machine import KINDS, MeasuredMachine, device_text, measure_machine
