"""Libraries that are missing or too old are named."""

import importlib.metadata

import pytest

from flexdilated import integrations


@pytest.mark.parametrize("found", ["4.57.1", None])
def test_what_is_needed_is_said(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.delattr(integrations, "transformers")
    monkeypatch.setattr(integrations, "version", version)
    with pytest.raises(ImportError, match=f"needs transformers 5 or newer; got {found or 'none'}"):
        integrations.transformers  # noqa: B018


def test_other_names_are_none() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'jax'"):
        integrations.jax  # noqa: B018
