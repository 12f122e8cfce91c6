"""The pytest plugin: light at start-up, a device for tests, profiles that change nobody's own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from pytest_flexdilated import pytest_configure, register_profiles

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "pytest_flexdilated", "-rs", "-q"]


def run_pytest(folder: Path, code: str, *arguments: str, conftest: str = "") -> None:
    """Passes in pytest in a project of its own, with the plugin and no other that is installed."""
    (folder / "test_it.py").write_text(textwrap.dedent(code), encoding="utf-8")
    (folder / "conftest.py").write_text(textwrap.dedent(conftest), encoding="utf-8")
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *PLAIN, *arguments]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_start_up_is_light(tmp_path) -> None:
    code = """
    import sys

    def test_nothing_heavy_is_loaded():
        assert "pytest_flexdilated" in sys.modules
        assert not {"torch", "flexdilated", "hypothesis"} & set(sys.modules)
    """
    run_pytest(tmp_path, code)


def test_the_device(pytester) -> None:
    """In this process, which has torch: each in its own would spend its time on the import."""
    pytester.makepyfile("""
    import torch

    def test_device(flexdilated_device):
        assert flexdilated_device == torch.device("meta")
    """)

    def run(device: str) -> tuple[dict[str, int], str]:
        done = pytester.runpytest_inprocess(*PLAIN, f"--flexdilated-device={device}")
        return done.parseoutcomes(), done.stdout.str()

    assert run("meta")[0] == {"passed": 1}
    outcomes, printed = run("cuda:77")
    assert outcomes == {"skipped": 1}
    assert "--flexdilated-device=cuda:77 does not work here: " in printed
    outcomes, printed = run("toaster")
    assert outcomes == {"errors": 1}
    assert "--flexdilated-device must name a device of torch; got 'toaster'" in printed
    assert "Error as error" not in printed  # no traceback
    assert run("hpu")[0] == {"skipped": 1}  # of which torch has no module


def test_profiles() -> None:
    """Ours may be named, one of a user's with our prefix, and any other."""
    register_profiles()
    ci, dev, thorough = (settings.get_profile(f"flexdilated-{name}") for name in ("ci", "dev", "thorough"))
    assert (ci.max_examples, dev.max_examples, thorough.max_examples) == (60, 15, 2000)
    assert (ci.derandomize, dev.derandomize, thorough.derandomize) == (True, False, False)
    assert ci.deadline is dev.deadline is thorough.deadline is None
    settings.register_profile("flexdilated-own", max_examples=7)
    for profile in ("flexdilated-own", "flexdilated-thorough", "theirs", None):
        pytest_configure(SimpleNamespace(getoption=lambda option, default, profile=profile: profile))
    assert settings.get_profile("flexdilated-own").max_examples == 7
    with pytest.raises(pytest.UsageError, match="must be one of 'flexdilated-dev', 'flexdilated-ci'"):
        pytest_configure(SimpleNamespace(getoption=lambda option, default: "flexdilated-nope"))
