"""Private names of torch are in one file, are in the installed torch, and end in a clear error where they are not."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
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
_OURS = {name for file in _FILES for name in defined(file) if is_private(name)} - _OF_TORCH


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
                ours = attribute in _OURS | _ELSEWHERE or ast.unparse(value) in ("self", "cls")
                if not ours or re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
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


# What runs into a missing name, where importing flexdilated does not.
_CALL = """
import flexdilated as fd, torch
from flexdilated import masks
q = torch.randn(1, 2, 16, 8, requires_grad=True)
"""
_CUDA = """
import torch
from flexdilated.engines.kernels._kernel_cuda import KERNELS
kernel, q = KERNELS[{number}], torch.randn(1, 1, 8, 8)
kernel.{side}
"""
_FORWARD, _BACKWARD = "forward(q, q, q, 1.0, False)", "backward(q, q, q, q, q, q[..., 0], 1.0, False)"
_RECORDED = "from flexdilated.engines import autograd_on\nwith autograd_on(): pass"
_GROUP = """
import torch.distributed as dist
from datetime import timedelta
from flexdilated.distributed.group._ranks import Ranks, timeout_of
options = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": timedelta(seconds=77)}
dist.init_process_group("gloo", **options)
ranks = Ranks(dist.group.WORLD.group_name, 1, 0, "cpu")
"""
_UNMARKED = f"""{_CALL}
import sys
for module in [each for name, each in sys.modules.items() if name.startswith("flexdilated")]:
    marked = [each for each in vars(module).values() if "_dynamo_marked_constant" in getattr(each, "__dict__", ())]
    for function in marked:
        del function._dynamo_marked_constant
call = lambda q: fd.attend(q, q, q, masks.causal())
assert torch.equal(torch.compile(call, backend="eager")(q), call(q))
torch._dynamo.reset()
try:
    torch.compile(call, backend="eager", fullgraph=True)(q)
except torch._dynamo.exc.Unsupported as error:
    # Torch 2.11 names what it meets first within the call.
    assert "_needed(" in str(error) or "_is_autocast_available" in str(error), error
else:
    raise AssertionError("no graph break")
"""
_TRIGGERS = {
    "marked_constant": _UNMARKED,
    "forward_level": f"{_CALL}fd.attend(q, q, q, masks.causal())",
    **dict.fromkeys(("DispatchKey", "ForceDispatchKeyGuard"), _RECORDED),
    **dict.fromkeys(("dispatch_tls_local_exclude_set", "dispatch_tls_local_include_set"), _RECORDED),
    "flash_attention_for_cpu": f"{_CALL}fd.attend(q, q, q, masks.causal())",
    "flash_attention_for_cpu_backward": f"{_CALL}fd.attend(q, q, q, masks.causal()).sum().backward()",
    **{
        f"{kind}_attention{end}": _CUDA.format(number=number, side=side)
        for number, kind in enumerate(("flash", "cudnn", "efficient"))
        for end, side in (("", _FORWARD), ("_backward", _BACKWARD))
    },
    "mark_static": f"{_CALL}from flexdilated.engines.flex._slots import _fixed\n_fixed(q.to('meta'))",
    "duck_shape": "from flexdilated.engines.flex._flex import equal_sizes_apart\nwith equal_sizes_apart(): pass",
    "has_triton": "from flexdilated._engine_choice import default_engine\ndefault_engine('cuda')",
    "FakeTensor": f"{_CALL}fd.attend(q, q, q, masks.causal(), autotune=True)",
    "resolve_process_group": "from flexdilated.distributed.group._ranks import group_of\ngroup_of('0')",
    "get_backend": f"{_GROUP}assert timeout_of(ranks) == timedelta(seconds=77)",
    "timeout": f"{_GROUP}assert timeout_of(ranks) == dist.default_pg_timeout",
    **dict.fromkeys(("to_copy", "unsafe_view"), "import flexdilated.viewer"),
}

# Takes names away, each in a process of its own, and says how what is run then ends.
_WITHOUT = """
import json, os, sys, traceback
import torch, torch._dynamo, torch.distributed, torch.nn.attention.flex_attention
from pkgutil import resolve_name

def hide(path):
    module, _, attributes = path.partition(":")
    *above, last = attributes.split(".")
    if last == "_dynamo_marked_constant":
        return  # which no look-up finds
    if above[:1] == ["ops"]:
        hide_operator([*above, last][2])
    elif last == "use_duck_shape":
        del resolve_name(module)._config[last]
    elif last == "_qkv_same_embed_dim":
        torch.nn.TransformerEncoderLayer.forward = lambda self, *args: None
    else:
        delattr(resolve_name(f"{module}:{'.'.join(above)}") if above else resolve_name(module), last)

def hide_operator(name):
    kind = type(torch.ops.aten)
    found = kind.__getattr__
    def look_up(self, asked):
        if asked == name:
            raise AttributeError(asked)
        return found(self, asked)
    kind.__getattr__ = look_up
    vars(torch.ops.aten).pop(name, None)

def run(path, code):
    hide(path)
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException as error:
        return [type(error).__name__, str(error), traceback.format_exc()]
    return ["", "", ""]

# Those that importing flexdilated needs come first: the others share one import.
for name, (path, code) in sorted(json.load(sys.stdin).items(), key=lambda each: each[1][1] != "import flexdilated"):
    if code != "import flexdilated":
        import flexdilated
    if os.fork() == 0:
        if name == "get_backend" and hasattr(torch.distributed.ProcessGroup, name):
            del torch.distributed.ProcessGroup.get_backend
        os.write(1, (json.dumps([name, *run(path, code)]) + "\\n").encode())
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def endings() -> dict[str, list[str]]:
    """For each name: how a process without it ends, as (kind of error, message, traceback)."""
    tried = {name: (each.path, _TRIGGERS.get(name, "import flexdilated")) for name, each in NAMES.items()}
    isolated = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _WITHOUT]
    done = subprocess.run(command, input=json.dumps(tried), env=isolated, capture_output=True, text=True, check=True)
    return {name: ending for name, *ending in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_ends_as_the_table_says(endings: dict[str, list[str]], name: str) -> None:
    kind, message, trace = endings[name]
    if NAMES[name].absent:
        assert kind == "", trace
    else:
        assert (kind, message) == ("ImportError", str(NAMES[name].missing())), trace
        assert f"torch {torch.__version__} has no {NAMES[name].dotted}" in message
