"""How much of this process is resident, now and at most, by the kernel's own account (Linux)."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc/self")


def begin_peak() -> int:
    """Resident bytes now, from where `peak_bytes` looks for the most. Raises OSError where the kernel keeps no account.

    The mark is VmHWM, not ru_maxrss: a child starts with its parent's ru_maxrss.
    """
    (_PROC / "clear_refs").write_text("5")  # resets the mark to what is resident now
    return resident_bytes()


def resident_bytes() -> int:
    """Resident bytes now. Raises OSError where the kernel keeps no account."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Most resident bytes at once since `begin_peak`. Raises OSError where the kernel keeps no account."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in (_PROC / "status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_PROC / 'status'} has no field {field}")
