"""The functions that docs/integrations/migration.md writes down."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.project.test_docs import run


@pytest.fixture(scope="session")
def page() -> SimpleNamespace:
    """What the examples of the page define."""
    return SimpleNamespace(**run(Path(__file__).resolve().parents[3] / "docs" / "integrations" / "migration.md"))
