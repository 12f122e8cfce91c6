"""timm, torchvision and diffusers, which `make test` keeps in a folder of their own, `vision` in the environment.

torchvision on PyPI is built for one CUDA torch. Beside another, or one without CUDA, its operators cannot be loaded. So
its import fails, as does that of whatever looks whether it is installed: transformers, for one. So it is on no path
until it is asked for here, and then gets what its import misses: the names of two operators, which no ViT calls.
"""

import importlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(sys.prefix) / "vision/site-packages"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def vision() -> tuple[Any, Any]:
    """(timm, torchvision), imported; diffusers can be imported from then on.

    Raises ImportError where they are not installed.
    """
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))
        if torch.version.cuda is None or not _is_built_for_this_torch():
            for name in _OPERATORS:
                torch.library.define(f"torchvision::{name}", _SCHEMA)
    try:
        return importlib.import_module("timm"), importlib.import_module("torchvision")
    except ImportError as error:
        message = f"timm and torchvision, which `make test` installs into {FOLDER}, are not there: {error}"
        raise ImportError(message) from error


def _is_built_for_this_torch() -> bool:
    built_for = metadata.requires("torchvision") or ()
    return f"torch=={torch.__version__.partition('+')[0]}" in built_for
