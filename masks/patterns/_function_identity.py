"""Identity of a function: a digest of its code and of the values it reads, and its copy on a device."""

from __future__ import annotations

import builtins
import dis
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from ..core import content_digest, device_kind

# Plain data: different values have different reprs.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (tuple, list, set, frozenset, dict, slice, torch.Size)
_ADVICE = "numbers, strings, tensors, containers of these, or plain functions"

# Built-in names that a function may use: they compute from their arguments and look up nothing by name.
_COMPUTING = """abs all any bool bytes callable complex dict divmod enumerate filter float frozenset int isinstance iter
len list map max min next pow print range reversed round set slice sorted str sum tuple zip"""
_BUILTINS = {name: getattr(builtins, name) for name in _COMPUTING.split()} | {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
# Packages whose modules, functions and classes count as constants, known by their names.
_CONSTANT = {"torch", "math", "operator", "_operator", "flexdilated"}

Identity = Any  # nested lists of strings and integers, which json.dumps writes unambiguously


def copy_and_digest(function: types.FunctionType, device: torch.device) -> tuple[types.FunctionType, str]:
    """Return (copy of the function and of the values it reads, with tensors on `device`; hex digest of the function).

    Equal digests mean equal functions, in all processes. The digest covers code, constants, defaults, captured values,
    and globals with their names; it does not cover the function's own name, names of local variables, and the place in
    a file. The function may read numbers, strings, dense tensors, containers of these, plain functions, and names of
    torch, math, operator and flexdilated. Raises TypeError if it reads other values, assigns captured variables or
    globals, imports, or looks up values by name.
    """
    try:
        identity, copy = _Walk(function.__qualname__, device).function(function)
        return copy, sha256(json.dumps(identity).encode()).hexdigest()
    except RecursionError:
        rule = f"the custom function {function.__qualname__!r} may only read values with comparable contents"
        raise TypeError(f"{rule}; it reads a container that holds itself or nests too deep") from None


@dataclass
class _Walk:
    """Traversal of a function and the values it reads; `function` and `value` return (identity, copy on `device`).

    name: name of the outermost function, for errors. seen: (number in order of visits, copy) of each visited function,
    by its id().
    """

    name: str
    device: torch.device
    seen: dict[int, tuple[int, types.FunctionType]] = field(default_factory=dict)

    def function(self, function: types.FunctionType) -> tuple[Identity, types.FunctionType]:
        if id(function) in self.seen:  # it calls itself
            number, copy = self.seen[id(function)]
            return ["seen", number], copy
        code, scope = function.__code__, {"__builtins__": builtins}
        read = self._globals(function)
        cells = tuple(types.CellType() for _ in code.co_freevars)
        copy = types.FunctionType(code, scope, function.__name__, None, cells)
        copy.__qualname__ = function.__qualname__
        self.seen[id(function)] = len(self.seen), copy
        parts = [self._code(code)]
        for name in sorted(read & function.__globals__.keys()):
            identity, scope[name] = self.value(function.__globals__[name], f"the global {name!r}")
            parts.append([name, identity])
        for name, old, new in zip(code.co_freevars, function.__closure__ or (), cells, strict=True):
            try:
                held = old.cell_contents
            except ValueError:
                rule = "a custom function must be built after all variables that it captures are assigned"
                raise TypeError(f"{rule}; {name!r} is not assigned yet") from None
            identity, new.cell_contents = self.value(held, f"the captured {name!r}")
            parts.append(identity)
        for name in ("__defaults__", "__kwdefaults__"):
            identity, values = self.value(getattr(function, name), "a default")
            setattr(copy, name, values)
            parts.append(identity)
        return ["function", *parts], copy

    def value(self, value: Any, what: str) -> tuple[Identity, Any]:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _TORCH_PLAIN):
            return [kind.__name__, repr(value)], value
        if kind in _CONTAINERS:
            return self._container(value, what)
        if isinstance(value, Tensor):
            return self._tensor(value, what)
        if (name := _constant_name(value)) is not None:
            return ["constant", name], value
        if isinstance(value, types.FunctionType):
            return self.function(value)
        before = ": read its values before the function, and use them there" if kind is types.ModuleType else ""
        rule = f"the custom function {self.name!r} may only read {_ADVICE}"
        raise TypeError(f"{rule}; {what} is of type {kind.__name__}{before}")

    def _code(self, code: types.CodeType) -> Identity:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        variables = (code.co_nlocals, len(code.co_freevars), len(code.co_cellvars))
        constants = [
            self._code(constant) if isinstance(constant, types.CodeType) else self.value(constant, "a constant")[0]
            for constant in code.co_consts
        ]
        return ["code", code.co_code.hex(), code.co_exceptiontable.hex(), counts, variables, code.co_names, constants]

    def _container(self, value: Any, what: str) -> tuple[Identity, Any]:
        kind = type(value)
        items = value.items() if kind is dict else (value.start, value.stop, value.step) if kind is slice else value
        entries = [self.value(item, f"an entry of {what}") for item in items]
        identities, copies = [identity for identity, _ in entries], [copy for _, copy in entries]
        if kind in (set, frozenset):
            identities.sort(key=json.dumps)
        return [kind.__name__, *identities], slice(*copies) if kind is slice else kind(copies)

    def _tensor(self, value: Tensor, what: str) -> tuple[Identity, Tensor]:
        plain = type(value) in (Tensor, Parameter, Buffer) and value.layout == torch.strided and not value.is_quantized
        if not plain or value.is_meta:
            got = f"a {type(value).__name__} of {value.layout} on {value.device.type}"
            raise TypeError(f"the custom function {self.name!r} needs plain dense tensors; {what} is {got}")
        with torch.inference_mode(False):
            value = value.detach().resolve_conj().resolve_neg()
            copy = value.to(self.device, copy=True, memory_format=torch.contiguous_format)
        content = content_digest(copy if device_kind(copy.device).on_host else value.cpu().contiguous())
        return ["tensor", str(copy.dtype), list(copy.shape), content], copy

    def _globals(self, function: types.FunctionType) -> set[str]:
        """Return the names of globals that the code reads.

        Raises TypeError if the code assigns globals or captured variables, imports, or looks up values by name.
        """
        rule, code, read = f"the custom function {self.name!r} must", function.__code__, set()
        for step in (step for inner in _codes(code) for step in dis.get_instructions(inner)):
            kind, name, hidden = step.opname, step.argval, ""
            captured = kind in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars
            if captured or kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise TypeError(f"{rule} keep no state; it assigns {name!r}, which it captured")
            if kind == "IMPORT_NAME":
                hidden = f"imports {name!r}"
            elif ("ATTR" in kind or kind == "LOAD_METHOD") and name.startswith("__"):
                hidden = f"reads the attribute {name!r}"
            elif "GLOBAL" in kind or kind == "LOAD_NAME":
                read.add(name)
                if name not in function.__globals__.keys() | _BUILTINS.keys() and hasattr(builtins, name):
                    hidden = f"uses {name!r}"
            if hidden:
                raise TypeError(
                    f"{rule} read values from its variables: import and look up before the function, and use the "
                    f"value there; {function.__qualname__!r} {hidden}"
                )
        return read


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _constant_name(value: Any) -> str | None:
    """Return the qualified name of a module, class or function that counts as a constant; None for other objects.

    Constants are the modules of torch, math, operator and flexdilated, the classes and functions that such a module
    holds under their own names, and built-in functions, types and exceptions that look up nothing by name.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__ if value.__name__.partition(".")[0] in _CONSTANT else None
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return None
    name, home = value.__name__, value.__module__ or "torch"  # torch.where names no module
    if home == "builtins":
        held = _BUILTINS.get(name)
    else:
        held = getattr(sys.modules.get(home), name, None) if home.partition(".")[0] in _CONSTANT else None
    return f"{home}.{name}" if held is value else None
