"""Which machine constants are in use: those given, those measured and stored, or those that come along."""

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
    """The constants with which plans for this kind of device are made.

    Those of `set_machine`; else of the file that FLEXDILATED_MACHINE names; else those that `python -m
    flexdilated tune` stored for this device, torch and number of threads; else those that come with the library.
    Raises ValueError where FLEXDILATED_MACHINE names no file of constants.

    >>> masks.machine().source
    'builtin'
    """
    return machine_of(torch.device(device).type)


def machine_of(kind: str) -> Machine:
    """`machine` of a kind of device, for look-ups."""
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
    """Plan with these constants, or with those of a file, on this kind of device from now on; None: as before.

    Plans made with other constants are not used any more. Raises ValueError for a file that holds none for it.

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
    """Read stored constants anew when they are next asked for."""
    with _lock:
        _found.clear()


def sources_in_use() -> dict[str, str]:
    """By kind of device, where the constants come from with which plans were made so far."""
    threads = torch.get_num_threads()
    found = {kind: each.source for (kind, of), each in _found.copy().items() if of in (0, threads)}
    return found | {kind: each.source for kind, each in _given.copy().items()}


def machine_from_environment() -> str:
    """What FLEXDILATED_MACHINE says, checked; ValueError where it names no file of constants."""
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
    """What `tune` stored for this very device; None where it stored nothing that can be used, which is logged."""
    if not (device_kind(kind).on_host or (device_kind(kind).is_cuda and torch.cuda.is_available())):
        return None  # a machine may plan for a kind of device that it lacks
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
