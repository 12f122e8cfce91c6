"""Measure the fastest options of a call, and the constants of a device."""

from ._tune import autotune, measure_options
from ._tune_machine import KINDS, MeasuredMachine, device_text, measure_machine
