"""Private names of torch are in one file, are in the installed torch, and end in a clear error where they are not."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from flexdilated._torch_private import NAMES

from .test_house import ROOT, SOURCES, tree

PRIVATE = "flexdilated._torch_private"
PAGE = ROOT / "docs" / "contributing" / "private_names.md"

# Attributes of other libraries: named tuples, argparse, transformers.
_ELSEWHERE = {"_replace", "_fields", "_make", "_ArgumentGroup", "_StoreTrueAction", "_hf_peft_config_loaded"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def has_private(dotted: str) -> bool:
    return any(map(is_private, dotted.split(".")))


# Attributes of torch's classes and of their instances.
_INSTANCES = (nn.Module(), nn.MultiheadAttention(1, 1, device="meta"), torch.empty(0), torch.empty(0).untyped_storage())
_CLASSES = (torch.autograd.Function, torch.distributed.ProcessGroup, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OF_TORCH = {name for each in (*_INSTANCES, *_CLASSES) for name in dir(each) if is_private(name)} | {"_timeout"}


def defined(file: Path) -> Iterator[str]:
    """The names that a file gives to functions, classes, arguments, variables and attributes of its own objects."""
    for node in ast.walk(tree(file)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name


_FILES = [file for module, file in SOURCES.items() if module != PRIVATE]


@cache
def ours() -> frozenset[str]:
    return frozenset(name for file in _FILES for name in defined(file) if is_private(name)) - _OF_TORCH


def uses(name: str, text: str) -> list[str]:
    """Each private name of torch that a file imports, reads, or has in a string.

    An attribute counts if it is of `torch` itself, or if nothing in the package defines an attribute of that name.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names, level=0):
                origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                dotted = [origin + each.name for each in names]
                found |= {(node.lineno, each) for each in dotted if each.startswith("torch.") and has_private(each)}
            case ast.Attribute(value=value, attr=attribute) if is_private(attribute):
                is_ours = attribute in ours() | _ELSEWHERE or ast.unparse(value) in ("self", "cls")
                if not is_ours or re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
                    found.add((node.lineno, ast.unparse(node)))
            case ast.Constant(value=str(value)):
                path = re.fullmatch(r"torch(\.\w+)*\.?", value) and has_private(value.rstrip("."))
                if path or (is_private(value) and (value in _OF_TORCH or hasattr(torch.ops.aten, value))):
                    found.add((node.lineno, repr(value)))
    return [
        f"{name}, line {line}: {use} is private to torch: give it a place in NAMES of flexdilated/_torch_private.py"
        for line, use in sorted(found)
    ]


def test_private_names_of_torch_are_in_one_file() -> None:
    planted = "import torch._dynamo\ntorch.ops.aten._softmax\nx._version\nnames = ('_to_copy', 'torch._inductor')\n"
    assert len(uses("masks/some.py", planted)) == 5
    found = (uses(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in _FILES)
    assert [use for each in found for use in each] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_torch_has_the_name(name: str) -> None:
    NAMES[name].find()


def test_every_name_is_used() -> None:
    module = SOURCES[PRIVATE].read_text(encoding="utf-8").partition("def __getattr__")[2]
    others = "".join(file.read_text(encoding="utf-8") for name, file in SOURCES.items() if name != PRIVATE)
    read = set(re.findall(r"_torch_private\.(\w+)", others))
    for names in re.findall(r"from \.+_torch_private import (\([^)]*\)|.*)", others):
        read.update(re.findall(r"\w+", names))
    unused = {name for name in NAMES if name not in read and f'"{name}"' not in module}
    assert {name for name in unused if NAMES[name].dotted.rpartition(".")[2] not in module} == set()


def test_the_page_lists_the_names() -> None:
    rows = [f"| `{name.dotted}` | {name.use} | {name.without} | {', '.join(name.seen)} |" for name in NAMES.values()]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| `")] == rows


def test_each_fault_that_is_worked_around_has_its_test() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 5
    assert {name for name in named if f"def {name}(" not in written} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_ends_in_an_error_that_says_what_to_do(name: str) -> None:
    gone = replace(NAMES[name], path="torch:no_such_name", public="", probe=None)
    with pytest.raises(ImportError, match=rf"torch {re.escape(torch.__version__)} has no torch\.no_such_name, which"):
        gone.find()
