"""Checks for patterns and attention modules, of this library or any other, for use in tests.

`flexdilated.testing.strategies` needs hypothesis and is imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..masks.core import no_such_name
from ._check_module import CheckResult, ModuleReport, check_attention_module, examine_attention_module
from ._check_pattern import check_pattern
from ._closeness import assert_attention_close
from ._inputs import MEMORY_LAYOUTS, laid_out
from ._module_checks import MODULE_CHECKS
from ._subject import Calls, identity_projections

if TYPE_CHECKING:
    from . import strategies as strategies

__all__ = [
    "MEMORY_LAYOUTS",
    "MODULE_CHECKS",
    "Calls",
    "CheckResult",
    "ModuleReport",
    "assert_attention_close",
    "check_attention_module",
    "check_pattern",
    "examine_attention_module",
    "identity_projections",
    "laid_out",
]


def __getattr__(name: str) -> Any:
    """Return the module `strategies`, imported on first access; raise AttributeError for any other name."""
    if name == "strategies":
        return import_module(".strategies", __name__)
    raise AttributeError(no_such_name(__name__, name, __all__, {}, "testing."))
