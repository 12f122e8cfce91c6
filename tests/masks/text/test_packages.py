"""Patterns of other packages: imports by entry points for unknown names only, and errors of these imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


FOUND = """
import json, os, sys
import torch
import flexdilated as fd
from flexdilated import masks

assert "torch._dynamo" not in sys.modules, "the compiler, which takes a second to import"
mine = ("comb_patterns", "broken_patterns", "taken_patterns")


def refused(read, text):
    try:
        read(text)
    except ValueError as error:
        return str(error)


def say(texts):
    said = {"before": [name for name in mine if name in sys.modules]}
    read = [masks.from_json(text) if text.startswith("{") else masks.parse(text) for text in texts]
    said["after"] = [name for name in mine if name in sys.modules]
    said["equal"] = len({*read, masks.from_json(masks.to_json(read[0])), masks.parse(repr(read[0]))})
    said["printed"], said["pairs"] = repr(read[0]), masks.describe(read[0], 8).useful_pairs
    q, k, v = torch.randn(3, 1, 2, 50, 8)
    exact = fd.attend(q, k, v, read[0], engine="reference")
    said["near"] = torch.allclose(fd.attend(q, k, v, read[0]), exact, rtol=1e-4, atol=1e-5)
    said["parse"], said["json"] = refused(masks.parse, "camb(4)"), refused(masks.from_json, '{"kind":"camb"}')
    said["kept"] = masks.parse("causal()") == masks.causal() != masks.every()
    print(json.dumps(said), flush=True)


fd.attend(*torch.randn(3, 1, 1, 9, 8), masks.parse("causal() & longnet((8, 16), (1, 2))"))  # imports the compiler
masks.from_json('{"kind":"causal"}')
texts = ["comb(3) & causal()", "masks.comb(step=3) & causal()", sys.argv[1]]
if not os.fork():  # in a process of its own, as the first unknown name imports the packages
    say(texts[::-1])
    os._exit(0)
assert os.wait()[1] == 0
say(texts)
"""
COMB_JSON = '{"kind":"and","parts":[{"kind":"comb","step":3},{"kind":"causal"}]}'
BROKEN_TEXT = (
    "Package 'broken-package' has patterns in broken_patterns, whose import raises ModuleNotFoundError: "
    "No module named 'a_module_that_nobody_has'. "
)
TAKEN_TEXT = (
    "Package 'taken-package' has patterns in taken_patterns, whose import raises ValueError: 'causal' is taken by "
    "flexdilated.masks.patterns._band.causal: choose another name. "
)


@pytest.mark.slow
def test_patterns_of_a_package_are_found_when_they_are_asked_for(packages: Path) -> None:
    """By expressions and by JSON; known names import no packages, and those that fail do not affect others.

    Errors about unknown names give the packages that fail, and if names collide the library's pattern stays.
    """
    path = os.pathsep.join([str(packages), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", FOUND, COMB_JSON]
    done = subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    for said in (first, second):
        assert (said["before"], said["after"]) == ([], ["comb_patterns"])
        assert (said["printed"], said["equal"]) == ("comb(3) & causal()", 1)
        assert said["pairs"] == sum((q - k) % 3 == 0 for q in range(8) for k in range(q + 1))
        assert said["near"]
        assert f"no pattern is called 'camb': {BROKEN_TEXT}{TAKEN_TEXT}did you mean comb? There are " in said["parse"]
        assert said["json"].startswith("a pattern must be an object whose kind is one of after, and, ")
        assert ", comb, custom, " in said["json"]
        assert said["json"].endswith(f"; got {{'kind': 'camb'}}. {BROKEN_TEXT}{TAKEN_TEXT}".rstrip())
        assert said["kept"]
