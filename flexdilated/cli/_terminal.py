"""Common parts of all commands: argument parser, sizes with K and M, terminal and file output, progress, extras."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

import torch

from ..masks.inspection import LEAST_COLUMNS, LEAST_LINES

# package -> (extra that installs it, consequence of its absence)
EXTRAS = {
    "tqdm": ("testing", "plain lines instead of a progress bar"),
    "matplotlib": ("plot", "no pictures"),
}
COLOR_CHOICES = ("auto", "always", "never")
_BROKEN_PIPE = 141  # what shells report of a process that SIGPIPE ended
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_COLUMNS, _LINES = 80, 24  # if the terminal's size is unknown
_SHAPES = "·░▒▓█▀▄│─┌┐└┘┬┤├┴×…"
_SIZE = re.compile(r"([0-9]{1,18})([KM]?)", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


class UsageError(Exception):
    """Error in the use of a command, whose exit status is then 2."""


class Argument(NamedTuple):
    """Rules for a command-line argument, which `CommandParser` enforces.

    shown: its name in messages.
    least, most: inclusive limits of its value; None: no limit.
    needs, excludes: `dest` of arguments that must or must not be given with it; "device=cuda" excludes only that value
        of --device.
    """

    shown: str
    default: Any
    least: float | None
    most: float | None
    needs: tuple[str, ...]
    excludes: tuple[str, ...]


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError for arguments that break their rules.

    The rules are those of `Argument`: limits of the value, and arguments that exclude or need each other.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.rules: dict[str, Argument] = {}  # by `dest`
        super().__init__(*arguments, **options)

    def argument(
        self,
        *names: str,
        needs: Sequence[str] = (),
        excludes: Sequence[str] = (),
        least: float | None = None,
        most: float | None = None,
        group: argparse._ArgumentGroup | None = None,
        default: Any = None,
        help: str = "",  # noqa: A002
        **how: Any,
    ) -> None:
        """Add an argument as `add_argument` does, with conditions for its use.

        needs, excludes, least, most: as in `Argument`.
        group: the group of the help to add it to; None: no group.
        """
        text = help.replace("%(default)s", str(default))
        action = (group or self).add_argument(*names, default=argparse.SUPPRESS, help=text, **how)
        if default is None and isinstance(action, argparse._StoreTrueAction):
            default = False
        shown = next((name for name in names if name.startswith("--")), how.get("metavar", names[0]))
        self.rules[action.dest] = Argument(shown, default, least, most, tuple(needs), tuple(excludes))

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]: one in place of the overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse as argparse does; return (values, []).

        Raises UsageError for values out of range and for arguments that exclude or need each other. Unknown arguments
        end the process with status 2, as invalid ones do in argparse.
        """
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = ", ".join(each.shown for each in self.rules.values() if each.shown.startswith("--"))
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; there are {options}" if options else ""))
        given = [name for name in self.rules if hasattr(found, name)]
        for name, each in self.rules.items():
            if name not in given:
                setattr(found, name, each.default)
        for refusal in self._refusals(found, given):
            raise UsageError(refusal)
        return found, rest

    def _refusals(self, options: argparse.Namespace, given: Sequence[str]) -> Iterator[str]:
        for name in given:
            asked, value = self.rules[name], getattr(options, name)
            if asked.least is not None and value < asked.least:
                yield f"{asked.shown} must be at least {asked.least}; got {value}"
            if asked.most is not None and value > asked.most:
                yield f"{asked.shown} must be at most {asked.most}; got {value}"
        for name in given:
            shown = self.rules[name].shown
            for other in self.rules[name].excludes:
                dest, equals, value = other.partition("=")
                if dest in given and (not equals or getattr(options, dest) == value):
                    with_what = self.rules[dest].shown + (f" {value}" if equals else "")
                    yield f"{shown} has no effect with {with_what}: leave one of them out"
            for other in self.rules[name].needs:
                if other not in given:
                    yield f"{shown} needs {self.rules[other].shown}; got it without"


def size_of(text: str) -> int | None:
    """Return the number in a text such as "65536", "64K" or "1M", where K is 2**10 and M 2**20; None for other text."""
    found = _SIZE.fullmatch(text.strip())
    return int(found[1]) * _UNITS[found[2].upper()] if found else None


def status_of(run: Callable[[], int]) -> int:
    """Call `run`, flush standard output and return the exit status of `run`.

    Returns 2 if the output cannot be written, 141 if its reader closed it.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:  # the interpreter's own flush would print a traceback
                sys.stdout.flush()
    except BrokenPipeError:  # as `head` ends a pipe
        _discard_output()
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        print_error(f"standard output must be writable; {error.strerror}")
        return 2


def print_error(error: str) -> None:
    with suppress(OSError):
        print(f"flexdilated: error: {error}", file=sys.stderr, flush=True)


def _discard_output() -> None:
    """Redirect standard output to the null device, so that the unwritten rest is discarded."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal(NamedTuple):
    """Properties of a terminal.

    columns, lines: its size in characters.
    color: True to write 256 ANSI colors to it.
    shapes: True if its encoding has the non-ASCII characters of pictures.
    """

    columns: int
    lines: int
    color: bool
    shapes: bool


def terminal_of(stream: TextIO, *, color: str = "auto") -> Terminal:
    """Return the properties of the terminal that a stream writes to.

    color: "always", "never", or "auto": colors if the stream is a terminal, unless the environment has NO_COLOR
        (https://no-color.org) or TERM=dumb.

    The size is that of `shutil.get_terminal_size`, or 80 x 24 if it is unknown, but at least LEAST_COLUMNS x
    LEAST_LINES.
    """
    size = shutil.get_terminal_size((_COLUMNS, _LINES))
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    wanted = color == "always" or (color == "auto" and stream.isatty() and not is_plain)
    try:
        _SHAPES.encode(stream.encoding or "utf-8")  # None: a stream of text that is not encoded
        shapes = True
    except (UnicodeEncodeError, LookupError):
        shapes = False
    return Terminal(max(size.columns, LEAST_COLUMNS), max(size.lines, LEAST_LINES), wanted, shapes)


def require_file(flag: str, path: Path | None, kinds: Sequence[str]) -> None:
    """Raise UsageError unless the path has one of the suffixes `kinds` and its folder exists; None passes.

    If ".png" is among the suffixes, matplotlib must be installed. flag: name of the option in the error.
    """
    if path is None:
        return
    if path.suffix.lower() not in kinds:
        raise UsageError(f"{flag} writes {' or '.join(kinds)} files; got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} must be in a folder that exists; got {path}")
    if ".png" in kinds and optional_package("matplotlib") is None:
        raise UsageError(missing_line("matplotlib"))


def write_file(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except (OSError, ValueError) as error:  # a path that holds a NUL is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the file must be one that can be written; {str(path)!r}: {reason}") from None


def optional_package(package: str) -> ModuleType | None:
    """Import a package and return it, or None if it is not installed.

    Copies inside setuptools count as not installed.
    """
    # torch adds such copies to the path of this process when it looks for a compiler.
    try:
        found = import_module(package)
    except ImportError:
        return None
    return None if "_vendor" in Path(found.__file__ or "").parts else found


def missing_line(package: str) -> str:
    """Return text for a package of EXTRAS that is not installed: the consequence, and the command that installs it."""
    extra, cost = EXTRAS[package]
    return f'{package} is not installed: {cost} (pip install "flexdilated[{extra}]")'


@contextmanager
def progress(what: str, *, unit: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Context that shows progress on standard error, as a bar if tqdm is installed, else as lines.

    Yields a function move(done, note), to call with the number of finished units and a short text.

    what: label of the bar.
    unit: noun for a unit, such as "example".
    total: number of all units.
    """
    tqdm = optional_package("tqdm")
    if tqdm is None:
        print(missing_line("tqdm"), file=sys.stderr)
        yield lambda done, note: print(f"{unit} {done} of {total}: {note}", flush=True, file=sys.stderr)
        return
    with tqdm.tqdm(total=total, unit=unit, desc=what, dynamic_ncols=True) as bar:

        def move(done: int, note: str) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)

        yield move


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one CPU thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
