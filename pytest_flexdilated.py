"""A pytest plugin: the option --flexdilated-device with its fixture, and hypothesis profiles.

A top-level module that imports neither torch nor flexdilated, as pytest imports it at every start. It is active in
every environment with flexdilated, so it loads no profile and changes none.
PYTEST_DONT_REWRITE: a conftest may import it before pytest does.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

# No deadline, as machines differ in speed and are shared. `ci` draws the same examples every time.
_PROFILES = {
    "dev": {"max_examples": 15},
    "ci": {"max_examples": 60, "derandomize": True},
    "thorough": {"max_examples": 2000},
}
_PREFIX = "flexdilated-"
_LONGEST_REASON = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --flexdilated-device."""
    what = "device for the fixture flexdilated_device, such as cuda or cuda:1 (cpu)"
    parser.getgroup("flexdilated").addoption("--flexdilated-device", default="cpu", metavar="DEVICE", help=what)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register our profiles if --hypothesis-profile names one; hypothesis looks it up after this."""
    name = str(config.getoption("--hypothesis-profile", None))
    if not name.startswith(_PREFIX):
        return
    register_profiles()
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    try:
        settings.get_profile(name)
    except InvalidArgument:
        known = ", ".join(repr(_PREFIX + profile) for profile in _PROFILES)
        raise pytest.UsageError(f"--hypothesis-profile must be one of {known}, or one of yours; got {name!r}") from None


@pytest.fixture(scope="session")
def flexdilated_device(request: pytest.FixtureRequest) -> torch.device:
    """Device of --flexdilated-device; skips the test if a tensor cannot be made on it."""
    import torch

    name = str(request.config.getoption("--flexdilated-device"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        pytest.fail(f"--flexdilated-device must name a device of torch; got {name!r}: {reason}", pytrace=False)
    try:
        torch.empty(1, device=device)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        reason = textwrap.shorten(str(error).partition("\n")[0], _LONGEST_REASON, placeholder=" ...")
        pytest.skip(f"--flexdilated-device={name} does not work here: {reason}")
    return device


def register_profiles(prefix: str = _PREFIX) -> None:
    """Register the hypothesis profiles dev, ci and thorough, under names with this prefix.

    An existing profile is not changed. `settings.load_profile(prefix + "ci")` loads one.
    """
    from hypothesis import HealthCheck, settings
    from hypothesis.errors import InvalidArgument

    base = settings(settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    for name, options in _PROFILES.items():
        try:
            settings.get_profile(prefix + name)
        except InvalidArgument:
            settings.register_profile(prefix + name, base, **options)
