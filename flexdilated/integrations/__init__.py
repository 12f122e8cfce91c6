"""Other libraries' models with this library's attention: a module for each library, imported when it is asked for."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import transformers

__all__ = ["transformers"]

_LEAST = {"transformers": 5}  # the major version whose names are used


def __getattr__(name: str) -> Any:
    """The module of a library. Raises ImportError where that is missing or too old."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "none"
    if found == "none" or int(found.split(".")[0]) < _LEAST[name]:
        raise ImportError(
            f"flexdilated.integrations.{name} needs {name} {_LEAST[name]} or newer; got {found}: "
            f"pip install 'flexdilated[{name}]'"
        )
    return import_module(f".{name}", __name__)
