"""Machine constants in use: set by the user, measured and stored, or built in."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch

from ...core import advises, device_kind
from ._machine import BUILTIN, Machine, builtin_machine
from ._machine_file import MachineKey, read_machine, stored_path

VARIABLE = "FLEXDILATED_MACHINE"
_log = logging.getLogger("flexdilated")

_Slot = tuple[str, int]
_lock = threading.Lock()
_given: dict[str, Machine] = {}  # by kind of device, from set_machine
_found: dict[_Slot, Machine] = {}  # by kind and threads; read once


def machine(device: torch.device | str = "cpu") -> Machine:
    """The constants used in plans for this kind of device.

    The first of: constants of `set_machine`; the file that FLEXDILATED_MACHINE names; constants that `python -m
    flexdilated tune` stored for this device, torch and number of threads; built-in constants.
    Raises ValueError if FLEXDILATED_MACHINE names no file of constants.

    >>> masks.machine().source
    'builtin'
    """
    return machine_of(torch.device(device).type)


def machine_of(kind: str) -> Machine:
    """`machine` by kind of device."""
    given = _given.get(kind)
    if given is not None:
        return given
    slot = (kind, torch.get_num_threads() if device_kind(kind).on_host else 0)
    found = _found.get(slot)
    if found is None:
        with _lock:
            found = _found.setdefault(slot, _find(kind))
    return found


@advises()
def set_machine(value: Machine | str | os.PathLike[str] | None, *, device: torch.device | str = "cpu") -> None:
    """Use these constants, or a file's, for plans on this kind of device from now on; None restores the default.

    Plans made with other constants are no longer used. Raises ValueError for a file without constants for this kind.

    >>> masks.set_machine(None)  # the built-in constants, or those that `tune` stored
    """
    kind = torch.device(device).type
    if value is None:
        _given.pop(kind, None)
        return
    if not isinstance(value, Machine | str | os.PathLike):
        raise TypeError(f"set_machine needs a Machine, the path of a file, or None; got {type(value).__name__}")
    _given[kind] = value if isinstance(value, Machine) else _from_file(Path(value), kind)


def forget_machines() -> None:
    """Drop stored constants, so that they are read again at the next use."""
    with _lock:
        _found.clear()


def sources_in_use() -> dict[str, str]:
    """Source of the constants of plans made so far, by kind of device."""
    threads = torch.get_num_threads()
    found = {kind: each.source for (kind, of), each in _found.copy().items() if of in (0, threads)}
    return found | {kind: each.source for kind, each in _given.copy().items()}


def machine_from_environment() -> str:
    """Value of FLEXDILATED_MACHINE; ValueError if it names no file of constants."""
    named = os.environ.get(VARIABLE, BUILTIN)
    if named != BUILTIN:
        _read(Path(named))
    return named


def _find(kind: str) -> Machine:
    builtin = builtin_machine(kind)
    named = os.environ.get(VARIABLE)
    if named == BUILTIN:
        return builtin
    if named is not None:
        key, found = _read(Path(named))
        if key.kind != kind:
            return builtin
        if key != MachineKey.of(kind):
            _log.warning("%s: constants measured on %s are used on %s", VARIABLE, key, MachineKey.of(kind))
        return found
    return _stored(kind) or builtin


def _stored(kind: str) -> Machine | None:
    """Constants that `tune` stored for this very device; None if none are usable, logged if some were stored."""
    if not (device_kind(kind).on_host or (device_kind(kind).is_cuda and torch.cuda.is_available())):
        return None  # plans may be made for a device that is not present
    key = MachineKey.of(kind)
    path = stored_path(key)
    if path is None or not path.is_file():
        return None
    try:
        found_key, found = read_machine(path)
    except ValueError as error:
        _log.warning("stored constants are not used; `python -m flexdilated tune` measures them anew: %s", error)
        return None
    if found_key != key:
        _log.warning("stored constants are not used: %s holds those of %s, and this is %s", path, found_key, key)
        return None
    return found


def _from_file(path: Path, kind: str) -> Machine:
    key, found = read_machine(path)
    if key.kind != kind:
        raise ValueError(f"the file must hold constants of a device of type {kind!r}; got {key} in {path}")
    return found


def _read(path: Path) -> tuple[MachineKey, Machine]:
    try:
        return read_machine(path)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} must be {BUILTIN!r} or name a file that `tune` wrote; {error}") from None
