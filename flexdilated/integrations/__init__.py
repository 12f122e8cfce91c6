"""Other libraries' models with this library's attention: a module for each library, imported when it is asked for."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..masks.core import no_such_name

if TYPE_CHECKING:
    from . import torchscale, transformers

__all__ = ["torchscale", "transformers"]

_LEAST = {"transformers": 5}  # the major version whose names are used; what is not here needs no library


def __getattr__(name: str) -> Any:
    """The module of a library. Raises ImportError where that is needed, and missing or too old."""
    if name not in __all__:
        elsewhere: dict[str, str] = dict.fromkeys(
            ("hf", "huggingface", "set_pattern"), "transformers.set_pattern(model, pattern)"
        )
        raise AttributeError(no_such_name(__name__, name, __all__, elsewhere, "fd.integrations."))
    if name in _LEAST:
        _require(name)
    return import_module(f".{name}", __name__)


def _require(name: str) -> None:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "none"
    if found == "none" or int(found.split(".")[0]) < _LEAST[name]:
        raise ImportError(
            f"flexdilated.integrations.{name} needs {name} {_LEAST[name]} or newer; got {found}: "
            f"pip install 'flexdilated[{name}]'"
        )
