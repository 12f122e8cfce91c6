"""Models of other libraries with this library's attention.

`transformers` and `torchscale` are imported on first access. `flexdilated.convert` converts modules of torch, timm,
x-transformers and diffusers.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..masks.core import no_such_name

if TYPE_CHECKING:
    from . import torchscale, transformers

__all__ = ["torchscale", "transformers"]

_MINIMUM_MAJOR_VERSION = {"transformers": 5}  # other libraries need not be installed


def __getattr__(name: str) -> Any:
    """Import and return the submodule `torchscale` or `transformers`; AttributeError for any other name.

    Raises ImportError for `transformers` if that library is not installed or older than version 5.
    """
    if name not in __all__:
        elsewhere: dict[str, str] = dict.fromkeys(
            ("hf", "huggingface", "set_pattern"), "transformers.set_pattern(model, pattern)"
        )
        raise AttributeError(no_such_name(__name__, name, __all__, elsewhere, "fd.integrations."))
    if name in _MINIMUM_MAJOR_VERSION:
        _require_library(name)
    return import_module(f".{name}", __name__)


def _require_library(name: str) -> None:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "none"
    if found == "none" or int(found.split(".")[0]) < _MINIMUM_MAJOR_VERSION[name]:
        raise ImportError(
            f"flexdilated.integrations.{name} needs {name} {_MINIMUM_MAJOR_VERSION[name]} or newer; got {found}: "
            f"pip install 'flexdilated[{name}]'"
        )
