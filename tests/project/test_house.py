"""The rules of the house: which room imports from which, public names, dependencies, a quiet import."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from flexdilated import masks
from flexdilated.masks.core._expression import CONSTRUCTORS

ROOT = Path(__file__).resolve().parents[2]

# Lowest first: a room imports from those before it, at the top of a file or inside a function, and from the room
# itself, not from its files. `root` is the package's own `__init__`, from which the commands import as users do.
_ROOMS = """
_torch_private masks.core masks.patterns masks.extend masks.recipes masks.text masks.orders masks.blocks
masks.plan_cache masks.planning masks.attended masks.inspection masks
schedules _validate engines biases _engine_choice tuning memory _attend flex_attention decoding observe
refinement distributed.group distributed.wire distributed.counts
distributed._exchange_plan distributed._exchange distributed._ring distributed._heads distributed._attend distributed
_over_ranks selection nn _plan_size _plan integrations root testing viewer cli __main__
"""
ROOMS = _ROOMS.split()
GROUND = {"torch", "jaxtyping", "tabulate"} | set(sys.stdlib_module_names)
USERS = {"testing", "viewer", "cli"}
EXTRAS = {"hypothesis", "matplotlib", "tqdm", "transformers"}
# Used where it is installed, and imported when it is needed.
LATE = {
    "flexdilated.engines.kernels._gathered_keys": {"triton"},  # comes with torch where it serves the accelerator
    "flexdilated.observe._received": {"matplotlib"},
    "flexdilated.masks.inspection._plot": {"matplotlib"},
    "flexdilated.masks.inspection._plot_figure": {"matplotlib"},
    "flexdilated.masks.inspection._order_gain": {"scipy"},
}


def sources() -> dict[str, Path]:
    """Module name -> file, for the whole package; the symlink `flexdilated/masks` is not followed."""
    folders = {"flexdilated": ROOT / "flexdilated", "flexdilated.masks": ROOT / "masks"}
    return {
        ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for package, folder in folders.items()
        for file in sorted(folder.rglob("*.py"))
    }


SOURCES = sources()


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def when_run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without the branches of `if TYPE_CHECKING`."""
    left = [tree]
    while left:
        yield (node := left.pop())
        for child in ast.iter_child_nodes(node):
            is_typing = isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING"
            if not is_typing and not isinstance(child, ast.expr):
                left.append(child)


@cache
def imports(module: str, file: Path) -> frozenset[str]:
    """Every module that this one imports, at the top or inside a function; relative names are resolved.

    What only type checkers read is no import.
    """
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in when_run(tree(file)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            inner = (f"{origin}.{alias.name}" for alias in node.names)
            found.update(each if each in SOURCES else origin for each in inner)
    return frozenset(found)


def room(module: str) -> str:
    """The room that a module of the package stands in."""
    _, *path = module.split(".")
    return ".".join(path[: 2 if path[0] in ("masks", "distributed") else 1]) if path else "root"


def climbs(module: str, file: Path) -> list[str]:
    """The rooms not below its own from which a module imports."""
    rooms = {room(name) for name in imports(module, file) if name.partition(".")[0] == "flexdilated"}
    return sorted(each for each in rooms - {room(module)} if ROOMS.index(each) > ROOMS.index(room(module)))


_elsewhere = [folder for folder in sys.path if Path(folder).resolve() != ROOT]
is_installed = any(importlib.metadata.distributions(name="flexdilated", path=_elsewhere))


def test_rooms_import_from_the_rooms_below() -> None:
    assert {module: found for module, file in SOURCES.items() if (found := climbs(module, file))} == {}


def test_rooms_import_from_rooms_and_not_from_their_files() -> None:
    inner = {
        f"{module} imports {name}"
        for module, file in SOURCES.items()
        for name in imports(module, file)
        if name in SOURCES and room(name) not in (room(module), name.removeprefix("flexdilated."))
        if SOURCES[name].name != "__init__.py"
    }
    # The commands show what the checks are made of.
    assert {each for each in inner if not re.match(r"\S+\.cli\.\w+ imports flexdilated\.testing\.", each)} == set()


_KINDS = frozenset(("cpu", "cuda", "meta", "mps", "xpu"))


def kinds_compared(code: ast.AST) -> list[int]:
    """Lines that compare something with the name of a kind of devices, or with several."""
    found = []
    for node in ast.walk(code):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        constants = [part for side in sides for part in (side, *getattr(side, "elts", ()))]
        found += [node.lineno for part in constants if isinstance(part, ast.Constant) and part.value in _KINDS]
    return found


def test_kinds_of_devices_are_told_apart_in_one_place() -> None:
    assert kinds_compared(ast.parse('x.device.type == "cpu" or kind in ("cuda", "xpu")')) == [1, 1, 1]
    assert {module: lines for module, file in SOURCES.items() if (lines := kinds_compared(tree(file)))} == {}


def test_a_name_of_a_class_has_one_meaning() -> None:
    classes = Counter(
        node.name for file in SOURCES.values() for node in tree(file).body if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in classes.items() if times > 1} == set()


def test_modules_import_each_other_in_no_circle() -> None:
    below = {module: {name for name in imports(module, file) if name in SOURCES} for module, file in SOURCES.items()}
    list(TopologicalSorter(below).static_order())


def test_imports_are_declared_dependencies() -> None:
    """Only the commands may use an extra, who imports one late, and what is there for one; none uses the checkout."""

    def allowed(module: str) -> set[str]:
        if room(module) == "integrations":
            return GROUND | {"flexdilated"} | EXTRAS.intersection(module.split(".")[2:3])
        return GROUND | {"flexdilated"} | (EXTRAS if room(module) in USERS else LATE.get(module, set()))

    undeclared = [
        f"{module} imports {name}"
        for module, file in SOURCES.items()
        for name in imports(module, file)
        if name.partition(".")[0] not in allowed(module)
    ]
    assert undeclared == []


def test_constructors_of_patterns_are_exported() -> None:
    """All public names stand in docs/api, which test_docs.py compares with what the packages export."""
    made = {name for name, made in CONSTRUCTORS.items() if made.__module__.startswith("flexdilated.")}
    assert {name for name in made if "." not in name} <= set(masks.__all__)


QUIET = """
import importlib.util, json, os, random, signal, sys, warnings
import torch, torch._dynamo, torch._inductor.config

def settings():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [
        torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
        str(torch.get_default_dtype()), str(torch.get_default_device()), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), cuda.matmul.allow_tf32, cudnn.allow_tf32,
        torch._dynamo.config.get_hash().hex(), torch._inductor.config.get_hash().hex(),
        torch.get_rng_state().tolist(), hash(random.getstate()), dict(os.environ),
        [str(entry) for entry in warnings.filters], str(signal.getsignal(signal.SIGINT)),
    ]

before, known = settings(), set(sys.modules)
import flexdilated
changed = [pair for pair in zip(before, settings()) if pair[0] != pair[1]]
loaded = sorted(set(sys.modules) - known)
stats = flexdilated.stats()
counted = [len(stats.pools), len(stats.constants), "flexdilated.distributed" in sys.modules]
on_the_path = [bool(importlib.util.find_spec(name)) for name in ("masks", "bench")]
late = "flexdilated.integrations" not in sys.modules
flexdilated.convert(torch.nn.MultiheadAttention(8, 2), flexdilated.masks.causal())
libraries = sorted({"timm", "torchvision", "x_transformers", "transformers", "einops"} & set(sys.modules))
print(json.dumps([changed, loaded, counted, on_the_path, late, libraries]))
"""


@pytest.mark.skipif(not is_installed, reason="flexdilated is not installed here")
def test_import_only_imports(tmp_path: Path) -> None:
    """No setting of torch or Python changes, no extra is loaded, no plan is made, no compiler for counts."""
    isolated = [sys.executable, "-I", "-c", QUIET]  # does not see the checkout
    done = subprocess.run(isolated, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changed, loaded, counted, on_the_path, late, libraries = json.loads(done.stdout)
    assert changed == []
    assert not {name.partition(".")[0] for name in loaded} & (EXTRAS | {"hypothesis", "pytest"})
    assert counted == [0, 0, False]
    assert on_the_path == [False, False]
    assert late
    assert libraries == []  # nor by `convert`: models of a library that nobody has loaded are not there


def test_every_package_is_listed_for_the_build() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = [module for module, file in SOURCES.items() if file.name == "__init__.py"]
    assert sorted(settings["packages"]) == sorted(packages)
