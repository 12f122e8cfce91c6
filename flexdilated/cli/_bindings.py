"""--bind: run-time tensors as people write them, such as the lengths of packed documents."""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ..masks.core import LARGEST, Expression, Pattern
from ..masks.patterns import Documents, Given, Lengths, RunTime, VisibleKeys, names, require_values, run_time_leaves
from ._command_parser import UsageError
from ._sizes import tokens_of

_FILES = (".json", ".pt")
_ENTRIES = "/"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_RANGE = re.compile(r"([^:]+):([^:]+)")
# What torch.load meets in bytes that are no such file: it says so in as many ways as its readers have.
_DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError),
    *(RuntimeError, TypeError, UnpicklingError, ValueError, struct.error),
)


@dataclass(frozen=True)
class Value:
    """What a run-time tensor is made of: `tensor(num_tokens)`, which raises UsageError where it does not fit.

    `positions` is how many tokens it has values for: the fewest that hold them all, 0 where that is not known.
    """

    positions: int
    tensor: Callable[[int], Tensor]


def read_bindings(pattern: Expression, texts: Sequence[str]) -> dict[str, Value]:
    """The value of each NAME=VALUE. Raises UsageError for other texts, and for names the pattern does not need."""
    found: dict[str, Value] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise UsageError(f"--bind takes NAME=VALUE, such as documents=100,200,300; got {text!r}")
        if name not in names(pattern):
            needed = ", ".join(names(pattern)) or "none"
            raise UsageError(f"--bind must name a run-time tensor of the pattern, which needs {needed}; got {name!r}")
        if name in found:
            raise UsageError(f"--bind gives each run-time tensor one value; got two for {name!r}")
        found[name] = (
            _from_file(pattern, name, Path(value)) if value.endswith(_FILES) else _from_text(pattern, name, value)
        )
    return found


def carried(pattern: Expression) -> dict[str, Value]:
    """The tensors that the pattern has with it. Raises UsageError where two go by one name."""
    try:
        return {name: _of_tensor(pattern, name, tensor) for name, tensor in pattern.given_tensors().items()}
    except ValueError as error:
        raise UsageError(str(error)) from None


def with_values(pattern: Expression, values: Mapping[str, Value], num_tokens: int) -> Expression:
    """The pattern with these tensors in place."""
    given = {name: Given(value.tensor(num_tokens)) for name, value in values.items()}

    def with_tensor(leaf: Pattern) -> Pattern:
        return replace(leaf, given=given[leaf.name]) if isinstance(leaf, RunTime) and leaf.name in given else leaf

    return pattern.map_leaves(with_tensor)


def one_entry(pattern: Expression, batch: int) -> Expression:
    """The pattern with the rows of one batch entry in place of all."""
    found: dict[str, Given] = {}

    def with_row(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, RunTime) or leaf.given is None:
            return leaf
        tensor = leaf.given.tensor
        given = found.setdefault(leaf.name, Given(tensor[batch]) if leaf.differs_by_entry(tensor) else leaf.given)
        return replace(leaf, given=given)

    return pattern.map_leaves(with_row)


def _from_text(pattern: Expression, name: str, text: str) -> Value:
    """By what the pattern does with the tensor."""
    (kind, *others) = _kinds(pattern, name)
    if others or kind not in _READERS:
        raise UsageError(f"--bind {name} needs a .json or .pt file with the tensor itself; got {text!r}")
    return _READERS[kind](name, [entry.strip() for entry in text.split(_ENTRIES)])


def _kinds(pattern: Expression, name: str) -> set[type[RunTime]]:
    """What the pattern does with the tensor of this name."""
    return {type(leaf) for leaf in run_time_leaves(pattern) if leaf.name == name}


def _documents(name: str, entries: Sequence[str]) -> Value:
    """Lengths of documents one after the other; what is left of the tokens is padding."""
    lengths = [_whole_numbers(name, entry) for entry in entries]

    def tensor(num_tokens: int) -> Tensor:
        rows = torch.full((len(lengths), num_tokens), -1)
        for row, each in zip(rows, lengths, strict=True):
            if sum(each) > num_tokens:
                raise UsageError(f"the documents of {name} must fit into {num_tokens} tokens; got {sum(each)} in all")
            row[: sum(each)] = torch.arange(len(each)).repeat_interleave(torch.tensor(each))
        return rows if len(rows) > 1 else rows[0]

    return Value(max(map(sum, lengths)), tensor)


def _lengths(name: str, entries: Sequence[str]) -> Value:
    """Real tokens of each batch entry, which a comma separates as well."""
    values = torch.tensor([number for entry in entries for number in _whole_numbers(name, entry)])
    return Value(int(values.max()), lambda num_tokens: values)


def _visible(name: str, entries: Sequence[str]) -> Value:
    """Ranges of keys, each with its first and the one after its last."""
    ranges = [[_range(name, part) for part in entry.split(",")] for entry in entries]

    def tensor(num_tokens: int) -> Tensor:
        marks = torch.zeros(len(ranges), num_tokens, dtype=torch.bool)
        for row, each in zip(marks, ranges, strict=True):
            for keys in each:
                if keys.stop > num_tokens:
                    raise UsageError(f"the keys of {name} must be below {num_tokens}; got {keys.start}:{keys.stop}")
                row[keys.start : keys.stop] = True
        return marks if len(marks) > 1 else marks[0]

    return Value(max(keys.stop for each in ranges for keys in each), tensor)


_READERS: dict[type[RunTime], Callable[[str, Sequence[str]], Value]] = {
    Documents: _documents,
    Lengths: _lengths,
    VisibleKeys: _visible,
}


def _whole_numbers(name: str, text: str) -> list[int]:
    numbers = [tokens_of(part) for part in text.split(",")]
    if any(number is None or number > LARGEST for number in numbers):
        raise UsageError(f"--bind {name} takes whole numbers with commas, such as 100,2K,300, or a file; got {text!r}")
    return [number for number in numbers if number is not None]


def _range(name: str, text: str) -> range:
    found = _RANGE.fullmatch(text.strip())
    first, stop = (tokens_of(part) for part in found.groups()) if found else (None, None)
    if first is None or stop is None or first >= stop:
        raise UsageError(f"--bind {name} takes ranges FIRST:STOP with commas, such as 0:100,200:300; got {text!r}")
    return range(first, stop)


def _from_file(pattern: Expression, name: str, path: Path) -> Value:
    try:
        tensor = read_torch(path) if path.suffix == ".pt" else _listed(json.loads(path.read_bytes()))
    except OSError as error:
        raise UsageError(f"--bind {name} must name a file that can be read; {error}") from None
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise UsageError(f"--bind {name} must name a file with a tensor; {path}: {error!s:.120}") from None
    if not isinstance(tensor, Tensor):
        raise UsageError(f"--bind {name} must name a file with a tensor; {path} holds a {type(tensor).__name__}")
    return _of_tensor(pattern, name, tensor)


def _of_tensor(pattern: Expression, name: str, tensor: Tensor) -> Value:
    """A tensor itself has a value for each position, unless it holds lengths."""
    try:
        require_values(name, tensor)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if tensor.numel() > LARGEST:  # an expanded one is a small file
        raise UsageError(f"--bind {name} takes at most {LARGEST} values; got {tensor.numel()}")
    positions = tensor.shape[-1] if tensor.dim() else 0
    if _kinds(pattern, name) == {Lengths}:
        positions = int(tensor.max()) if tensor.numel() and tensor.dtype in _INTEGERS else 0
    return Value(positions, lambda num_tokens: tensor)


def _listed(data: Any) -> Tensor:
    """Numbers or booleans in lists, or one number."""
    kinds = [type(entry) for row in (data if isinstance(data, list) else [data])
             for entry in (row if isinstance(row, list) else [row])]  # fmt: skip
    if len(list(groupby(kinds))) != 1 or kinds[0] not in (int, bool, float):
        raise ValueError("must hold numbers, or true and false, in one list or one a batch entry")
    return torch.tensor(data)


def read_torch(path: Path) -> Any:
    """What the file holds, on the CPU; nothing but data is unpickled.

    Raises OSError where it cannot be read, and ValueError where torch.load does not read it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of an old format, which is read or is damage
            return torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise ValueError(f"torch.load does not read it ({type(error).__name__})") from None
