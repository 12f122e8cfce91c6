"""A pytest plugin: the option --flexdilated-device with its fixture, and hypothesis profiles.

A module of its own, beside the package: pytest imports it at every start, and it imports neither torch nor flexdilated.
It is there for every project beside which flexdilated is installed, so it loads no profile, and changes none.
PYTEST_DONT_REWRITE: a conftest may import it before pytest does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

# Machines differ in speed and are shared: time is no verdict. `ci` draws the same examples every time.
_PROFILES = {
    "dev": {"max_examples": 15},
    "ci": {"max_examples": 60, "derandomize": True},
    "thorough": {"max_examples": 2000},
}
_PREFIX = "flexdilated-"


def pytest_addoption(parser: pytest.Parser) -> None:
    """--flexdilated-device."""
    what = "device for the fixture flexdilated_device, such as cuda or cuda:1 (cpu)"
    parser.getgroup("flexdilated").addoption("--flexdilated-device", default="cpu", metavar="DEVICE", help=what)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """--hypothesis-profile may name one of ours; it is looked up right after this."""
    if str(config.getoption("--hypothesis-profile", None)).startswith(_PREFIX):
        register_profiles()


@pytest.fixture(scope="session")
def flexdilated_device(request: pytest.FixtureRequest) -> torch.device:
    """The device that --flexdilated-device names, on which a tensor was made; without one the test is skipped."""
    import torch

    name = str(request.config.getoption("--flexdilated-device"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise pytest.UsageError(f"--flexdilated-device must name a device of torch; got {name!r}: {reason}") from None
    try:
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        pytest.skip(f"--flexdilated-device={name} does not work here: {reason}")
    return device


def register_profiles(prefix: str = _PREFIX) -> None:
    """Register the hypothesis profiles dev, ci and thorough, under names with this prefix.

    A profile that is there already stays as it is. None is loaded: `settings.load_profile(prefix + "ci")` does.
    """
    from hypothesis import HealthCheck, settings
    from hypothesis.errors import InvalidArgument

    base = settings(settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    for name, options in _PROFILES.items():
        try:
            settings.get_profile(prefix + name)
        except InvalidArgument:
            settings.register_profile(prefix + name, base, **options)
