"""timm and torchvision, for tests."""

from typing import Any

import pytest

from bench import _vision


def vision() -> tuple[Any, Any]:
    """(timm, torchvision), imported; skips the test where they are not installed."""
    try:
        return _vision.vision()
    except ImportError as error:
        pytest.skip(str(error))
