"""The one way in which commands read a pattern: an expression, a JSON file, or what a Python file makes."""

from __future__ import annotations

import runpy
from pathlib import Path
from traceback import extract_tb
from typing import Any

from .. import masks
from ..masks import Mixture, Pattern
from ._usage import UsageError


def read_pattern(text: str) -> Pattern | Mixture:
    """The pattern of an expression, of FILE.json, or of FILE.py:NAME. Raises UsageError where it is none of these."""
    file, colon, name = text.rpartition(":")
    try:
        if colon and file.endswith(".py"):
            return _of_module(file, name)
        if text.endswith(".json"):
            return masks.from_json(Path(text).read_text("utf-8"))
        return masks.parse(text)
    except OSError as error:
        raise UsageError(f"PATTERN must be an expression or a file that can be read; {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"PATTERN must be an expression or a file of JSON in UTF-8; got {text}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _of_module(file: str, name: str) -> Pattern | Mixture:
    if not Path(file).is_file():
        raise UsageError(f"PATTERN must be an expression or a file that can be read; got {file!r}, which is no file")
    made = {key: value for key, value in _run(file).items() if isinstance(value, Pattern | Mixture)}
    if name not in made:
        held = ", ".join(map(repr, made)) or "none"
        raise UsageError(f"{file} must make a pattern of that name; got {name!r}, and the patterns in it are {held}")
    return made[name]


def _run(file: str) -> dict[str, Any]:
    """What the file has defined at its end. Raises UsageError, with its last line that was reached, where it raises."""
    try:
        return runpy.run_path(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the file's own code may raise anything, and what it raises may not print
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
        reached = f", line {lines[-1]}" if lines else ""
        raise UsageError(f"{file} must run without an error{reached}; got {_said(error)}") from error


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
