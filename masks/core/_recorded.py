"""Recorded functions: the torch operations of a caller's function, with the tensors that it reads.

A score_mod or mask_mod may read closures, globals, attributes and buffers. It is called when the caller hands it over.
Later computations run the recorded operations, so new values of variables and attributes have no effect. A change in
place of a tensor has an effect only if a recorded operation reads this tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from inspect import signature
from itertools import count
from math import inf, isfinite, nan
from operator import attrgetter
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._torch_private import is_batchedtensor, tree_leaves, tree_map_only
from ._torch_modes import are_modes_on, suspended_torch_modes

Function = Callable[..., Tensor]

# Methods that return a Python value of a tensor. While a function is recorded, its arguments have no values.
_READ_VALUES = {
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
    *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
}
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_AUGMENTED = {f"__i{name}__" for name in _OPERATORS}
# Functions that use the shape, dtype or device of their first argument, and not its values.
_USE_SHAPE_ONLY = {
    *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
}
# Functions that take tensors of indices. Trial calls give them zeros, which are valid indices; other functions get
# ones, which are valid divisors.
_INDEXING = {
    *("__getitem__", "__setitem__", "index", "index.Tensor"),
    *("embedding", "gather", "index_select", "one_hot", "take", "take_along_dim"),
}


class RecordError(Exception):
    """Error: a function cannot be recorded.

    rule: the rule that the function broke, a sentence without its subject; `about` puts the function's name before it.
    kind: class of the error that `about` returns.
    """

    def __init__(self, rule: str, kind: type[Exception] = ValueError) -> None:
        super().__init__(rule)
        self._kind = kind

    def about(self, function: str) -> Exception:
        """Return an error whose text is the rule, after the name `function`."""
        return self._kind(f"{function} {self}")


_NO_BRANCHES = (
    "must not branch on values of tensors (`if`, `and`, `or`, `a < b < c`): write torch.where, or `&`, `|` and `~`"
)
_ONLY_TORCH = "must compute by functions of torch, without TorchScript and torch.func"


@dataclass(frozen=True, eq=False)
class Recorded:
    """The operations of a function, and the tensors that it read.

    build: function of these tensors, or of others in their place; it returns a plain function of the recorded
        function's arguments. `build` can be a key of caches: functions with equal operations and equal Python values
        may share one `build`.
    shape, dtype: of the recorded function's result.
    reads: indices of the arguments on whose values the result may depend.
    text: Python code of `build`; None for a result of `through`, and if the code uses functions or objects for which no
        name in torch is found.

    >>> scale = torch.tensor(2.0)
    >>> recorded = record(lambda x: x * scale, [torch.float32], torch.device("cpu"))
    >>> recorded(torch.tensor(3.0)), recorded.tensors
    (tensor(6.), (tensor(2.),))
    """

    build: Callable[..., Function]
    tensors: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    reads: frozenset[int]
    text: str | None

    @cached_property
    def function(self) -> Function:
        return self.build(*self.tensors)

    def __call__(self, *args: Tensor) -> Tensor:
        return self.function(*args)

    def reading(self, tensors: Sequence[Tensor]) -> Recorded:
        """Return a copy with `tensors` in place of the tensors that the function read."""
        return replace(self, tensors=tuple(tensors))

    def through(self, translate: Callable[..., Function], *tensors: Tensor) -> Recorded:
        """Return the `Recorded` of the function translate(function, *tensors); its tensors end with `tensors`.

        `translate` must be a function at module level. The results of the function that it returns must have the same
        shape and dtype as before, and depend on the same arguments.
        """
        build = _translated_build(self.build, translate, len(self.tensors))
        return replace(self, build=build, tensors=(*self.tensors, *tensors), text=None)


def record(
    function: Callable[..., Any], dtypes: Sequence[torch.dtype], device: torch.device, *, shape: tuple[int, ...] = ()
) -> Recorded:
    """Call a function once, with a tensor of this shape for each dtype, and return its operations as a `Recorded`.

    Operations that do not depend on the arguments are computed in this call, and autograd tracks them if it is on.

    device: device of the arguments in later calls. In this call the function gets stand-ins on the CPU, whose values
        mean nothing.

    Raises RecordError for a function that cannot be recorded, and any error that the function raises.
    """
    recorder = _Recorder(device)

    def call(level: Tensor) -> Tensor:
        recorder.level = level
        arguments = [recorder.argument(shape, dtype) for dtype in dtypes]
        with recorder:
            recorder.found = function(*arguments)
        return level

    # In a level of vmap, torch hands custom autograd functions to modes; outside of one, it runs their forward. The
    # stand-ins are mapped tensors, which tells results of code that modes do not see from captured tensors.
    try:
        torch.vmap(call)(torch.zeros(1, device="cpu"))
    except RuntimeError as error:
        if "randomness" in str(error):
            raise RecordError("must draw no random numbers") from error
        raise
    return recorder.recorded()


class _Recorder(TorchFunctionMode):
    """Torch-function mode that writes the operations on tensors that depend on the arguments as lines of code.

    It writes none for an operation that reads the shape, or another attribute that is no tensor.

    device: device of the arguments in later calls.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found: Any = None
        self.level: Tensor | None = None
        self._device = device
        self._has_gradients = torch.is_grad_enabled()
        self._outside_modes: Callable[[], AbstractContextManager[None]] = (
            suspended_torch_modes if are_modes_on() else nullcontext
        )
        self._arguments: list[str] = []
        self._lines: list[str] = []
        self._names: dict[int, str] = {}  # of values that depend on the arguments, by id
        self._reads: dict[int, frozenset[int]] = {}  # by id: indices of the arguments on which the value may depend
        self._made: set[int] = set()  # ids of other tensors that the function made, and may write to
        self._alive: list[Tensor] = []  # all of these tensors, so that no other gets the id of one
        self._captured: dict[int, tuple[str, Tensor]] = {}  # by id: name in the code, and the tensor
        self._objects: dict[str, Any] = {}  # by name in the code: values that have no name in torch

    def argument(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        index = len(self._arguments)
        self._arguments.append(f"x{index}")
        return self._stand_in(shape, dtype, self._arguments[-1], frozenset([index]))

    def recorded(self) -> Recorded:
        found = self.found
        if not isinstance(found, Tensor):
            raise RecordError(f"must return a tensor; got {type(found).__name__}", TypeError)
        body = _with_deletions((*self._lines, f"return {self._text(found)}"))
        captured = [*self._captured.values()]
        lines = [f"def build({', '.join(name for name, _ in captured)}):"]
        lines += [f"    def recorded({', '.join(self._arguments)}):"]
        lines += [f"        {line}" for line in body] + ["    return recorded"]
        text = "\n".join(lines)
        make = _compiled_build if all(map(_equals_only_itself, self._objects.values())) else _compiled_build.__wrapped__
        build = make(text, tuple(self._objects.items()))
        tensors = (_as_normal_tensor(x) if self._has_gradients else x for _, x in captured)
        reads = self._reads.get(id(found), frozenset())
        return Recorded(build, tuple(tensors), found.shape, found.dtype, reads, None if self._objects else text)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = [*_tensors(args[1:] if name in _USE_SHAPE_ONLY else args, kwargs)]
        depends, outside_modes = any(id(x) in self._names for x in _tensors(args, kwargs)), self._outside_modes
        if name == "custom_function_call":
            func, args, outside_modes = args[0].apply, args[1:], suspended_torch_modes
            if not depends:  # outside the level of vmap, for which it may have no rule
                has_gradients = torch.is_grad_enabled()
                with suspended_torch_modes(), torch.set_grad_enabled(has_gradients):
                    return func(*args)
        writes = name in _AUGMENTED or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        own = self._names if depends else self._made - self._captured.keys()
        if kwargs.get("out") is not None or (writes and id(args[0]) not in own):
            if name == "requires_grad_":  # torch.func.grad calls it
                raise RecordError(_ONLY_TORCH, TypeError)
            raise RecordError(f"must not write to tensors that it captured; it called {name}")
        if not depends:
            found = func(*args, **kwargs)
            self._alive += (made := [*_tensors(found)])
            self._made |= set(map(id, made))
            return found
        if name in _READ_VALUES:
            raise RecordError(f"{_NO_BRANCHES}; it called Tensor.{name}")
        if writes and self._names[id(args[0])] in self._arguments:  # which autograd may need
            self._write_line(args[0], f"{self._names[id(args[0])]}.clone()", args[0], self._reads[id(args[0])])
        reads = frozenset[int]().union(*(self._reads[id(x)] for x in given if id(x) in self._names))
        with outside_modes():
            found = self._trial_call(func, name, args, kwargs)
        if name != "__setitem__" and not any(True for _ in _tensors(found)):
            return found
        text = self._call_text(func, name, args, kwargs)
        if self._has_gradients and not torch.is_grad_enabled():
            self._lines.append("with no_grad():")
            text = f"    {text}"
        return self._write_line(found, text, args[0] if writes else None, reads)

    def _trial_call(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function with CPU tensors of the arguments' shapes and dtypes, and return the result.

        Its shapes and dtypes stand for those of the real result; its values mean nothing. If `func` reads the device or
        another attribute that is neither a tensor nor None, the result is that of a tensor on the recorder's device.
        """

        def of(x: Tensor) -> Tensor:
            if id(x) not in self._names:
                return torch.ones((), dtype=x.dtype, device="cpu").expand(x.shape)
            value = 0 if name in _INDEXING and not x.is_floating_point() else 1
            return torch.full(x.shape, value, dtype=x.dtype, device="cpu")

        tried, options = tree_map_only(Tensor, of, (args, kwargs))
        found = func(*tried, **options)
        if name == "__get__" and not (found is None or isinstance(found, Tensor)):  # an attribute, such as the device
            return func(torch.empty(args[0].shape, dtype=args[0].dtype, device=self._device))
        return found

    def _write_line(self, found: Any, text: str, written: Tensor | None, reads: frozenset[int]) -> Any:
        """Write the line of code of a call, and return the call's result for the function that is recorded.

        Returns None if `found` is None, `written` if that is a tensor, and else `found` with a stand-in for each of its
        tensors.

        found: result of a trial call.
        text: expression of the call.
        written: the tensor that the call changes in place, or None.
        reads: indices of the arguments on whose values the result may depend.
        """
        if written is not None:
            self._reads[id(written)] |= reads
        if found is None:
            self._lines.append(text)
            return None
        name = f"v{len(self._lines)}"
        indent = text[: len(text) - len(text.lstrip())]
        self._lines.append(f"{indent}{name} = {text.lstrip()}")
        if written is not None:
            self._names[id(written)] = name
            return written
        if isinstance(found, Tensor):
            return self._stand_in(found.shape, found.dtype, name, reads)
        parts = [
            self._stand_in(x.shape, x.dtype, f"{name}[{index}]", reads) if isinstance(x, Tensor) else x
            for index, x in enumerate(found)
        ]
        return type(found)(parts)

    def _stand_in(self, shape: Sequence[int], dtype: torch.dtype, name: str, reads: frozenset[int]) -> Tensor:
        assert self.level is not None
        with self._outside_modes():
            like = self.level if self._outside_modes is nullcontext else torch.empty(0, device="cpu")
            made = like.new_ones(shape, dtype=dtype)
        self._alive.append(made)
        self._names[id(made)], self._reads[id(made)] = name, reads
        return made

    def _call_text(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        texts = [*map(self._text, args)]
        if name == "__get__":
            return f"{texts[0]}.{func.__self__.__name__}"
        if name == "__getitem__":
            return f"{texts[0]}[{texts[1]}]"
        # Tensor.__pow__ calls itself pow
        method = next((each for each in (name, f"__{name}__") if getattr(Tensor, each, None) == func), None)
        if method is not None and isinstance(args[0] if args else None, Tensor):
            called, texts = f"{texts[0]}.{method}", texts[1:]
        else:
            called = _name_in_torch(func) or self._object_name(func)
        texts += [f"{key}={self._text(value)}" for key, value in kwargs.items()]
        return f"{called}({', '.join(texts)})"

    def _text(self, x: Any) -> str:
        kind = type(x)
        if isinstance(x, Tensor):
            known = self._names.get(id(x))
            if known is None and self._outside_modes is nullcontext and is_batchedtensor(x):
                raise RecordError(_ONLY_TORCH, TypeError)
            return known or self._captured.setdefault(id(x), (f"c{len(self._captured)}", x))[0]
        if kind.__module__ == "numpy" and hasattr(x, "item"):  # a single number
            x = x.item()
            kind = type(x)
        if isinstance(x, float):
            return repr(float(x)) if isfinite(x) else "nan" if x != x else f"{'-' if x < 0 else ''}inf"
        if isinstance(x, complex):
            return f"complex({self._text(x.real)}, {self._text(x.imag)})"
        if isinstance(x, str):
            return str.__repr__(x)
        if (
            x is None
            or x is ...
            or isinstance(x, torch.dtype | torch.layout | torch.memory_format)
            or kind in (bool, int)
        ):
            return repr(x)
        if isinstance(x, torch.device):
            return f"{self._arguments[0]}.device" if x == self._device else f"torch.device({str(x)!r})"
        if kind in (tuple, torch.Size):
            return f"({''.join(f'{self._text(each)}, ' for each in x)})"
        if kind is list:
            return f"[{', '.join(map(self._text, x))}]"
        if kind is slice:
            return f"slice({self._text(x.start)}, {self._text(x.stop)}, {self._text(x.step)})"
        return self._object_name(x)

    def _object_name(self, x: Any) -> str:
        name = _unique_name(x) if _equals_only_itself(x) else f"value_{next(_numbers)}"
        self._objects[name] = x
        return name


def refused_arguments(function: Callable[..., Any], number: int) -> str | None:
    """Return the signature of a function, as text, if the function does not take `number` positional arguments.

    Return None if it does, and for built-in functions without a signature.
    """
    try:
        taken = signature(function)
    except ValueError:  # some built-in functions have none
        return None
    try:
        taken.bind(*[None] * number)
    except TypeError:
        return str(taken)
    return None


def _with_deletions(lines: Sequence[str]) -> list[str]:
    """Return lines of code; each variable v0, v1, ... is deleted in the line that uses it last, unless that is the end.

    lines: code in which the last line returns the result.
    """
    made = {name for line in lines for name in re.findall(r"^\s*(v\d+) = ", line)}
    *body, end = lines
    later, found = set(re.findall(r"\bv\d+\b", end)), [end]
    for line in reversed(body):
        last = sorted(made.intersection(re.findall(r"\bv\d+\b", line)) - later)
        later.update(last)
        found.append(f"{line}; del {', '.join(last)}" if last else line)
    return found[::-1]


def _tensors(*values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


def _as_normal_tensor(x: Tensor) -> Tensor:
    """Return x; a copy if x was made in inference mode, as autograd cannot save such a tensor."""
    return x.clone() if x.is_inference() else x


def _name_in_torch(func: Any) -> str | None:
    """Return the name of a function in torch, such as "torch.nn.functional.softmax"; None if none is found."""
    name = getattr(func, "__name__", "")
    places = ("torch", "torch.nn.functional", "torch.Tensor")
    for known in (*(f"{place}.{name}" for place in places), name.replace("_", ".", 1), f"ops.{func}"):
        known = known.removeprefix("torch.")
        with suppress(AttributeError):
            if attrgetter(known)(torch) is func:
                return f"torch.{known}"
    return None


_numbers = count()


def _equals_only_itself(x: Any) -> bool:
    """Return True if x can be replaced by every value that equals x: a function, a class, an object without __eq__.

    Values of other types may be equal and yet differ: (0.0,) == (-0.0,) == (False,).
    """
    return isinstance(x, MethodType | BuiltinFunctionType) or type(x).__eq__ is object.__eq__


@lru_cache(maxsize=1024)
def _unique_name(x: Hashable) -> str:
    """Return a name that only values equal to x get in this process; x gets a new one once the cache has dropped x."""
    return f"value_{next(_numbers)}"


@lru_cache(maxsize=1024)
def _compiled_build(text: str, others: tuple[tuple[str, Any], ...]) -> Callable[..., Function]:
    scope: dict[str, Any] = {"torch": torch, "inf": inf, "nan": nan, "no_grad": torch.no_grad, **dict(others)}
    exec(compile(text, "<recorded function>", "exec"), scope)
    return scope["build"]


@lru_cache(maxsize=1024)
def _translated_build(
    build: Callable[..., Function], translate: Callable[..., Function], own: int
) -> Callable[..., Function]:
    """Return the `build` of `Recorded.through`: it takes the recorded function's tensors, then those for `translate`.

    build, translate: `build` of the recorded function, and the argument of `through`.
    own: number of the recorded function's tensors.
    """
    return lambda *tensors: translate(build(*tensors[:own]), *tensors[own:])
