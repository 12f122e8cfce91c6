"""Patterns of other packages: imports by entry points for unknown names only, and errors of these imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexdilated import masks
from flexdilated.masks.core import _packages

ROOT = Path(__file__).resolve().parents[3]

COMB = """
from flexdilated.masks.extend import Bounds, Pattern, at_least, constructor, count_multiples, parameters, pattern_kind


@pattern_kind("comb")
class Comb(Pattern):
    step: int = at_least(2)

    def mask_mod(self, *, num_heads, device):
        (step,) = parameters(device, self.step)
        return lambda b, h, q, k: (q - k) % step == 0

    def count(self, box, *, num_heads):
        return count_multiples(box, self.step)


@constructor
def comb(step):
    return Comb(step)
"""
BROKEN = "import a_module_that_nobody_has"
TAKEN = """
from flexdilated import masks
from flexdilated.masks.extend import constructor


@constructor
def causal():
    return masks.every()
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder for sys.path with three distributions: the import of comb works, the other two raise."""
    for package, source in (("comb", COMB), ("broken", BROKEN), ("taken", TAKEN)):
        tmp_path.joinpath(f"{package}_patterns.py").write_text(source, encoding="utf-8")
        folder = tmp_path / f"{package}_package-1.0.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {package}-package\nVersion: 1.0\n"
        folder.joinpath("METADATA").write_text(metadata, encoding="utf-8")
        points = f"[flexdilated.patterns]\n{package} = {package}_patterns\n"
        folder.joinpath("entry_points.txt").write_text(points, encoding="utf-8")
    return tmp_path


def python(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True, check=False)


FOUND = """
import json, sys
import torch
import flexdilated as fd
from flexdilated import masks

mine = ("comb_patterns", "broken_patterns", "taken_patterns")
masks.parse("causal() & longnet((8, 16), (1, 2))"), masks.from_json('{"kind":"causal"}')
before = [name for name in mine if name in sys.modules]
read = masks.from_json(sys.argv[1]) if sys.argv[1].startswith("{") else masks.parse(sys.argv[1])
after = [name for name in mine if name in sys.modules]
q, k, v = torch.randn(3, 1, 2, 50, 8)
exact = fd.attend(q, k, v, read, engine="reference")
near = torch.allclose(fd.attend(q, k, v, read), exact, rtol=1e-4, atol=1e-5)
again = masks.from_json(masks.to_json(read)) == masks.parse(repr(read)) == read
print(json.dumps([before, after, repr(read), near, again, masks.describe(read, 8).useful_pairs]))
"""

COMB_JSON = '{"kind":"and","parts":[{"kind":"comb","step":3},{"kind":"causal"}]}'


@pytest.mark.slow
@pytest.mark.parametrize("text", ["comb(3) & causal()", "masks.comb(step=3) & causal()", COMB_JSON])
def test_patterns_of_a_package_are_found_when_they_are_asked_for(packages: Path, text: str) -> None:
    """Importing flexdilated or parsing known names does not import packages; failing ones do not affect others."""
    done = python(packages, "-c", FOUND, text)
    assert done.returncode == 0, done.stderr
    before, after, printed, near, again, pairs = json.loads(done.stdout)
    assert (before, after) == ([], ["comb_patterns"])
    assert printed == "comb(3) & causal()"
    assert near
    assert again
    assert pairs == sum((q - k) % 3 == 0 for q in range(8) for k in range(q + 1))


@pytest.mark.slow
def test_the_commands_know_the_patterns_of_a_package(packages: Path) -> None:
    done = python(packages, "-m", "flexdilated", "show", "comb(4)", "-n", "64")
    assert done.returncode == 0, done.stderr
    assert "comb(4)" in done.stdout


BROKEN_TEXT = (
    "Package 'broken-package' has patterns in broken_patterns, whose import raises ModuleNotFoundError: "
    "No module named 'a_module_that_nobody_has'. "
)
TAKEN_TEXT = (
    "Package 'taken-package' has patterns in taken_patterns, whose import raises ValueError: 'causal' is taken by "
    "flexdilated.masks.patterns._band.causal: choose another name. "
)


@pytest.mark.slow
def test_an_unknown_name_gives_the_packages_that_fail(packages: Path) -> None:
    """If names collide, the name keeps the pattern of the library."""
    done = python(packages, "-m", "flexdilated", "show", "camb(4)", "-n", "64")
    assert done.returncode == 2
    assert f"no pattern is called 'camb': {BROKEN_TEXT}{TAKEN_TEXT}did you mean comb? There are " in done.stderr
    code = """
from flexdilated import masks
try:
    masks.from_json('{"kind":"camb"}')
except ValueError as error:
    print(error)
print(masks.parse("causal()") == masks.causal() != masks.every())
"""
    done = python(packages, "-c", code)
    assert done.returncode == 0, done.stderr
    error, kept = done.stdout.splitlines()
    assert ", comb, custom, " in error
    assert error.startswith("a pattern must be an object whose kind is one of after, and, ")
    assert error.endswith(f"; got {{'kind': 'camb'}}. {BROKEN_TEXT}{TAKEN_TEXT}".rstrip())
    assert kept == "True"


def test_without_packages_nothing_is_told_and_nothing_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_packages, "entry_points", lambda group: asked.append(group) or ())
    _packages.failed_imports.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^no pattern is called 'causl': did you mean causal\? There are "):
                masks.parse("causl()")
            with pytest.raises(ValueError, match=r"got \{'kind': 'causl'\}$"):
                masks.from_json('{"kind":"causl"}')
            assert masks.parse("causal()") == masks.causal()
        assert asked == ["flexdilated.patterns"]
    finally:
        _packages.failed_imports.cache_clear()
