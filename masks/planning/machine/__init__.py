"""Machine constants, from which costs are predicted."""

from ._machine import ACCELERATOR, BUILTIN, CPU, BlockRates, Machine, builtin_machine
from ._machine_file import MachineKey, Measured, stored_path, write_json
from ._machine_in_use import (
    VARIABLE,
    forget_machines,
    machine,
    machine_from_environment,
    machine_of,
    set_machine,
    sources_in_use,
)
