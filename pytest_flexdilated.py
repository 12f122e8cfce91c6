"""A pytest plugin: the option --flexdilated-device with its fixture, and hypothesis profiles.

It is a top-level module that imports neither torch nor flexdilated at its start, as pytest imports it in every session.
It is active in every environment with flexdilated, so it loads no hypothesis profile and changes no existing one.
PYTEST_DONT_REWRITE: a conftest may import it before pytest does, and pytest would warn that it cannot rewrite asserts.
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
    """Add the pytest option --flexdilated-device, the device of the fixture `flexdilated_device`; by default cpu."""
    what = "device for the fixture flexdilated_device, such as cuda or cuda:1 (cpu)"
    parser.getgroup("flexdilated").addoption("--flexdilated-device", default="cpu", metavar="DEVICE", help=what)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the hypothesis profiles of this plugin if --hypothesis-profile begins with "flexdilated-".

    It runs before hypothesis looks the profile up. Raises pytest.UsageError if no profile has the name.
    """
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
        raise pytest.UsageError(f"--hypothesis-profile must be one of {known}, or registered; got {name!r}") from None


@pytest.fixture(scope="session")
def flexdilated_device(request: pytest.FixtureRequest) -> torch.device:
    """Fixture: the torch device that --flexdilated-device names.

    Skips the test if a tensor cannot be made on the device, and fails it if the name is no device of torch.
    """
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
    """Register hypothesis profiles without deadline, under the names prefix + "dev", "ci" and "thorough".

    They draw 15, 60 and 2,000 examples; those of "ci" are the same in every run. An existing profile is not changed.
    `hypothesis.settings.load_profile(prefix + "ci")` loads one.
    """
    from hypothesis import HealthCheck, settings
    from hypothesis.errors import InvalidArgument

    base = settings(settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    for name, options in _PROFILES.items():
        try:
            settings.get_profile(prefix + name)
        except InvalidArgument:
            settings.register_profile(prefix + name, base, **options)
