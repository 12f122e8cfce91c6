"""Snapshot of a function: a digest of its code and of all that it reads, and a copy that is safe from later changes."""

from __future__ import annotations

import builtins
import dis
import json
import types
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from ...._torch_private import builtin_module, tensor_module
from ...core import content_digest, device_kind

# Plain data: different values have different reprs.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_ADVICE = "hand over numbers, strings, tensors, containers of these or plain functions instead"

# Built-in names that a function may use: they compute from their arguments and look up nothing by name.
_COMPUTING = """abs all any bool bytes callable complex dict divmod enumerate filter float frozenset int isinstance iter
len list map max min next pow print range reversed round set slice sorted str sum tuple zip"""
_BUILTINS = {name: getattr(builtins, name) for name in _COMPUTING.split()} | {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
# Python functions that compute from their arguments alone; others are read like functions of the caller.
_FIXED_FUNCTIONS = (
    *(tensor_module.__name__, "torch.functional", "torch.nn.functional"),
    "torch.nn.attention.flex_attention",
)
_FIXED_CLASSES = ("torch", builtin_module.__name__, "math", "operator")
_OPERATORS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
# These read a file, or attributes by names that are not in the code.
_BY_NAME = ("attrgetter", "methodcaller", "from_file")

Identity = Any  # nested lists of strings, for which json.dumps is unambiguous
Reads = Set[tuple[str, ...]]


def snapshot(function: types.FunctionType, device: torch.device) -> tuple[types.FunctionType, str]:
    """(copy of the function and of all it reads, with its tensors on this device; its digest).

    Equal digests mean equal functions. Names of functions and variables and the place in a file do not count;
    code, constants, defaults, captured values and globals do. Raises TypeError for values without a lasting
    identity, for code that assigns what it captured, and for code that imports or finds values by name.
    """
    reader = _Reader(function.__qualname__, device)
    try:
        identity, copy = reader.function(function)
        digest = sha256(json.dumps(identity).encode()).hexdigest()
    except RecursionError:
        rule = f"the custom function {function.__qualname__!r} must read values whose contents identify it"
        raise TypeError(f"{rule}; it reads a container that holds itself or nests too deep") from None
    return copy, digest


@dataclass
class _Reader:
    """One walk over a function and the values it reads; each value gives an identity and a copy."""

    name: str
    device: torch.device
    seen: dict[int, tuple[int, types.FunctionType]] = field(default_factory=dict)

    def function(self, function: types.FunctionType) -> tuple[Identity, types.FunctionType]:
        if id(function) in self.seen:  # it calls itself
            number, copy = self.seen[id(function)]
            return ["again", number], copy
        code, cells = function.__code__, function.__closure__ or ()
        self._check_code(function)
        scope: dict[str, Any] = {"__builtins__": builtins}
        copy = types.FunctionType(code, scope, function.__name__, None, tuple(types.CellType() for _ in cells))
        copy.__qualname__ = function.__qualname__
        self.seen[id(function)] = len(self.seen), copy
        parts = [self._code(code)]
        globals_read, captured_read = _reads(code, "LOAD_GLOBAL"), _reads(code, "LOAD_DEREF")
        for name in sorted(globals_read.keys() & function.__globals__.keys()):
            value = function.__globals__[name]
            identity, scope[name] = self.value(value, f"the global {name!r}", globals_read[name])
            parts.append([name, identity])
        for name, old, new in zip(code.co_freevars, cells, copy.__closure__ or (), strict=True):
            reads = captured_read.get(name, set())
            identity, new.cell_contents = self.value(_contents(old), f"the captured {name!r}", reads)
            parts.append(identity)
        identity, copy.__defaults__ = self.value(function.__defaults__, "a default")
        parts.append(identity)
        identity, copy.__kwdefaults__ = self.value(function.__kwdefaults__, "a default")
        return ["function", *parts, identity], copy

    def value(self, value: Any, what: str, reads: Reads = frozenset()) -> tuple[Identity, Any]:
        """(identity, copy) of a value; `reads`: chains of attributes that the code loads from it."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _TORCH_PLAIN):
            return [kind.__name__, repr(value)], value
        if kind in (tuple, list, set, frozenset, torch.Size):
            return self._sequence(value, what)
        if kind is dict:
            return self._mapping(value, what)
        if kind is slice:
            return self._sequence((value.start, value.stop, value.step), what)[0], value
        if kind is types.CodeType:
            return self._code(value), value
        if isinstance(value, Tensor):
            return self._tensor(value, what)
        fixed = _fixed_name(value)
        if fixed is not None:
            return ["fixed", fixed], value
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.ModuleType | types.SimpleNamespace) and reads and () not in reads:
            return self._attributes(value, what, reads)
        rule = f"the custom function {self.name!r} must read values whose contents identify it: {_ADVICE}"
        names = ", ".join(repr(".".join(each)) for each in sorted(reads) if each)
        before = f": read its {names} before the function, and use the value there" if names else ""
        raise TypeError(f"{rule}; {what} is of type {kind.__name__}{before}")

    def _code(self, code: types.CodeType) -> Identity:
        """Identity of code, without the function's name and line numbers."""
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        variables = (code.co_nlocals, len(code.co_freevars), len(code.co_cellvars))
        constants = [self.value(constant, "a constant")[0] for constant in code.co_consts]
        return ["code", code.co_code.hex(), code.co_exceptiontable.hex(), counts, variables, code.co_names, constants]

    def _attributes(self, value: Any, what: str, reads: Reads) -> tuple[Identity, types.SimpleNamespace]:
        """Namespace of the attributes that the code reads from a module or namespace, as its replacement."""
        identities, copy = [], types.SimpleNamespace()
        for name in sorted({first for first, *_ in reads if hasattr(value, first)}):
            rests = {tuple(rest) for first, *rest in reads if first == name}
            identity, attribute = self.value(getattr(value, name), f"{name!r} of {what}", rests)
            identities.append([name, identity])
            setattr(copy, name, attribute)
        return ["attributes", *identities], copy

    def _sequence(self, value: Any, what: str) -> tuple[Identity, Any]:
        identities, copies = [], []
        for item in value:
            identity, copy = self.value(item, f"an entry of {what}")
            identities.append(identity)
            copies.append(copy)
        if isinstance(value, set | frozenset):
            identities.sort(key=json.dumps)
        return [type(value).__name__, *identities], type(value)(copies)

    def _mapping(self, value: dict, what: str) -> tuple[Identity, dict]:
        keys, copied_keys = self._sequence(list(value), what)
        values, copied_values = self._sequence(list(value.values()), what)
        return ["dict", keys, values], dict(zip(copied_keys, copied_values, strict=True))

    def _tensor(self, value: Tensor, what: str) -> tuple[Identity, Tensor]:
        plain = type(value) in (Tensor, Parameter, Buffer) and value.layout == torch.strided and not value.is_quantized
        if not plain or value.is_meta:
            raise TypeError(f"the custom function {self.name!r} needs plain dense tensors; {what} is {_kind(value)}")
        with torch.inference_mode(False):
            value = value.detach().resolve_conj().resolve_neg()
            copy = value.to(self.device, copy=True, memory_format=torch.contiguous_format)
        content = content_digest(copy if device_kind(copy.device).on_host else value.cpu().contiguous())
        return ["tensor", str(copy.dtype), list(copy.shape), content], copy

    def _check_code(self, function: types.FunctionType) -> None:
        """Raise TypeError for code that assigns what it captured, or reads values that are not in its variables."""
        rule, code = f"the custom function {self.name!r} must", function.__code__
        for step in (step for inner in _codes(code) for step in dis.get_instructions(inner)):
            captured = step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
            if captured or step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise TypeError(f"{rule} be a rule and not keep state; it assigns {step.argval!r}, which it captured")
            if hidden := _hidden(step, function.__globals__.keys()):
                raise TypeError(
                    f"{rule} read values from its variables: import and look up before the function, and use the "
                    f"value there; {function.__qualname__!r} {hidden}"
                )


def _hidden(step: dis.Instruction, known: Set[str]) -> str:
    """Clause on a value that an instruction reads and that is in no variable, else ""."""
    if step.opname == "IMPORT_NAME":
        return f"imports {step.argval!r}"
    if "ATTR" in step.opname or step.opname == "LOAD_METHOD":
        return f"reads the attribute {step.argval!r}" if str(step.argval).startswith("__") else ""
    if "GLOBAL" in step.opname or step.opname == "LOAD_NAME":
        is_hidden = step.argval not in known and step.argval not in _BUILTINS and hasattr(builtins, step.argval)
        return f"uses {step.argval!r}" if is_hidden else ""
    return ""


def _kind(tensor: Tensor) -> str:
    return f"a {type(tensor).__name__} of {tensor.layout} on {tensor.device.type}"


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet: reading it in the copy fails as in the original
        raise TypeError("a custom function must find all that it captures assigned when it is made") from None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and the code of functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _reads(code: types.CodeType, load: str) -> dict[str, set[tuple[str, ...]]]:
    """Variables that the code loads by `load`, each with the chains of attributes that follow; () for none."""
    reads: dict[str, set[tuple[str, ...]]] = {}
    for inner in _codes(code):
        steps = list(dis.get_instructions(inner))
        for index, step in enumerate(steps):
            if step.opname == load or (step.opname == "LOAD_NAME" and load == "LOAD_GLOBAL"):
                chain = takewhile(lambda step: step.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[index + 1 :])
                reads.setdefault(step.argval, set()).add(tuple(step.argval for step in chain))
    return reads


def _fixed_name(value: Any) -> str | None:
    """Lasting name of a Python or torch object that computes from its arguments alone; None for other objects."""
    name = getattr(value, "__qualname__", "")
    if isinstance(value, _OPERATORS):
        module, name = "torch", str(value)
        fixed = name.partition(".")[0] in ("aten", "prims")
    elif isinstance(value, types.BuiltinFunctionType):
        module = _home(value)
        # Functions of the module itself query torch's modes; functions of its submodules compute.
        fixed = module in ("torch", "math", "_operator") or module.startswith(f"{builtin_module.__name__}._")
    elif isinstance(value, types.FunctionType):
        module = value.__module__ or ""
        # A closure, such as torch's and_masks(a, b), is defined by its captured values.
        fixed = module in _FIXED_FUNCTIONS and not value.__closure__ and "<locals>" not in name
    elif isinstance(value, type):
        module, fixed = value.__module__, value.__module__ in _FIXED_CLASSES
    else:
        return None
    if module == "builtins":
        fixed = _BUILTINS.get(name) is value or "." in name
    return f"{module}:{name}" if fixed and name.rpartition(".")[2] not in _BY_NAME else None


def _home(function: types.BuiltinFunctionType) -> str:
    """Module of a built-in function, or of its class; "" for a method of a value."""
    owner = function.__self__
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    # torch.where has no owner.
    return (function.__module__ or "") if owner is None else owner.__module__ if isinstance(owner, type) else ""
