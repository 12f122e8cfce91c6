"""What a function is: a digest of its code and of all that it reads, and a copy that later changes do not reach."""

from __future__ import annotations

import builtins
import dis
import json
import types
from collections.abc import Iterator
from ctypes import c_char
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

# What is plain data: its repr tells two values apart.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Modules whose contents do not change while a process runs.
_FIXED_MODULES = ("torch", "math", "operator", "_operator", "builtins")
_ADVICE = "hand over numbers, strings, tensors, containers of these or plain functions instead"

Identity = Any  # nested lists of strings: what json.dumps writes in one way only


@dataclass(frozen=True)
class Snapshot:
    """A function's copy, the digest by which equal functions are known, and the tensors that the copy holds."""

    function: types.FunctionType
    digest: str
    tensors: tuple[Tensor, ...]


def snapshot(function: types.FunctionType, device: torch.device) -> Snapshot:
    """Copy a function with all it reads, tensors to this device, and identify it by code and values.

    Names of functions and variables and the place in a file do not count; code, constants, defaults, captured
    values and globals do. Raises TypeError for values without a lasting identity, and for code that assigns
    what it captured.
    """
    reader = _Reader(function.__qualname__, device)
    identity, copy = reader.function(function)
    digest = sha256(json.dumps(identity).encode()).hexdigest()
    return Snapshot(copy, digest, tuple(reader.tensors))


@dataclass
class _Reader:
    """One walk over a function and what it reads: each value gives its identity and its copy."""

    name: str
    device: torch.device
    tensors: list[Tensor] = field(default_factory=list)
    seen: dict[int, tuple[int, types.FunctionType]] = field(default_factory=dict)

    def function(self, function: types.FunctionType) -> tuple[Identity, types.FunctionType]:
        if id(function) in self.seen:  # it calls itself
            number, copy = self.seen[id(function)]
            return ["again", number], copy
        code, cells = function.__code__, function.__closure__ or ()
        self._check_assignments(code)
        scope: dict[str, Any] = {"__builtins__": builtins}
        copy = types.FunctionType(code, scope, function.__name__, None, tuple(types.CellType() for _ in cells))
        copy.__qualname__ = function.__qualname__
        self.seen[id(function)] = len(self.seen), copy
        parts = [_code_identity(code)]
        for name in sorted(_global_names(code)):
            if name in function.__globals__:
                identity, scope[name] = self.value(function.__globals__[name], f"the global {name!r}")
                parts.append([name, identity])
        for name, old, new in zip(code.co_freevars, cells, copy.__closure__ or (), strict=True):
            identity, new.cell_contents = self.value(_contents(old), f"the captured {name!r}")
            parts.append(identity)
        identity, copy.__defaults__ = self.value(function.__defaults__, "a default")
        parts.append(identity)
        identity, copy.__kwdefaults__ = self.value(function.__kwdefaults__, "a default")
        return ["function", *parts, identity], copy

    def value(self, value: Any, what: str) -> tuple[Identity, Any]:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _TORCH_PLAIN):
            return [kind.__name__, repr(value)], value
        if kind in (tuple, list, set, frozenset, torch.Size):
            return self._sequence(value, what)
        if kind is dict:
            return self._mapping(value, what)
        if isinstance(value, Tensor):
            return self._tensor(value, what)
        fixed = _fixed_name(value)
        if fixed is not None:
            return ["fixed", fixed], value
        if isinstance(value, types.FunctionType):
            return self.function(value)
        rule = f"the custom function {self.name!r} must read values whose contents identify it"
        if isinstance(value, types.ModuleType):
            advice = "import what it uses from that module by name"
            raise TypeError(f"{rule}: {advice}; {what} is the module {value.__name__!r}")
        raise TypeError(f"{rule}: {_ADVICE}; {what} is of type {kind.__name__}")

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
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise TypeError(f"the custom function {self.name!r} needs plain dense tensors; {what} is {value.layout}")
        with torch.inference_mode(False):
            copy = value.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
            copy = copy.resolve_conj().resolve_neg()
        self.tensors.append(copy)
        return ["tensor", str(copy.dtype), list(copy.shape), _content_digest(copy)], copy

    def _check_assignments(self, code: types.CodeType) -> None:
        for inner in _codes(code):
            for step in dis.get_instructions(inner):
                captured = step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
                if captured or step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    rule = f"the custom function {self.name!r} must be a rule and not keep state"
                    raise TypeError(f"{rule}; it assigns {step.argval!r}, which it captured")


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet: reading it in the copy fails as in the original
        raise TypeError("a custom function must find all that it captures assigned when it is made") from None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _global_names(code: types.CodeType) -> set[str]:
    steps = (step for inner in _codes(code) for step in dis.get_instructions(inner))
    return {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _code_identity(code: types.CodeType) -> Identity:
    """The code without the names of the function and the places of its lines."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    variables = (code.co_nlocals, len(code.co_freevars), len(code.co_cellvars))
    constants = [_constant_identity(constant) for constant in code.co_consts]
    return ["code", code.co_code.hex(), code.co_exceptiontable.hex(), counts, variables, code.co_names, constants]


def _constant_identity(constant: Any) -> Identity:
    if isinstance(constant, types.CodeType):
        return _code_identity(constant)
    if isinstance(constant, tuple | frozenset):
        items = [_constant_identity(item) for item in constant]
        return [type(constant).__name__, *(items if isinstance(constant, tuple) else sorted(items, key=json.dumps))]
    return [type(constant).__name__, repr(constant)]


def _fixed_name(value: Any) -> str | None:
    """A lasting name of what Python and torch define, None for everything else."""
    if isinstance(value, types.ModuleType):
        module, name = value.__name__, ""
    elif isinstance(value, types.BuiltinFunctionType):
        # torch.where has no module, but hangs on a class that has one; [].append belongs to a list.
        owner = value.__self__
        if not isinstance(owner, type | types.ModuleType | None):
            return None
        module = owner.__module__ if isinstance(owner, type) else value.__module__ or ""
        name = value.__qualname__
    elif isinstance(value, type | types.FunctionType):
        module, name = value.__module__ or "", value.__qualname__
    elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        module, name = "torch", str(value)
    else:
        return None
    return f"{module}:{name}" if module.partition(".")[0] in _FIXED_MODULES else None


def _content_digest(tensor: Tensor) -> str:
    data = tensor.cpu()
    return sha256((c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b"").hexdigest()
