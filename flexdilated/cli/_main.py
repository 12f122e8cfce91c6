"""Arguments in, exit status out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from .. import __version__
from . import _check, _doctor, _explain, _plan, _show, _tune
from ._command_parser import CommandParser, UsageError
from ._output import require_open, tell, written

# What `python -m flexdilated --help` says of each command, and where its arguments stand.
_COMMANDS = {
    "show": ("draw a pattern as a heat map, and say what it allows and costs", _show),
    "explain": ("say why a query sees a key, or why not", _explain),
    "plan": ("say how a pattern is computed, what it takes, and what fits into memory", _plan),
    "check": ("hold a pattern of yours to its definition, and attend to it", _check),
    "tune": ("measure this device, or the ways to compute one pattern", _tune),
    "doctor": ("say what works on this machine, and what is missing", _doctor),
}
# What else one may call them.
_ELSEWHERE = {
    **dict.fromkeys(("plot", "draw", "describe", "mask", "view", "print"), "show"),
    "why": "explain",
    **dict.fromkeys(("cost", "memory", "fits", "layout"), "plan"),
    **dict.fromkeys(("test", "verify", "validate"), "check"),
    **dict.fromkeys(("bench", "benchmark", "autotune", "measure"), "tune"),
    **dict.fromkeys(("info", "env", "status", "devices"), "doctor"),
    "help": "--help",
    "version": "--version",
}
_INTERRUPTED = 130  # what shells report of a process that SIGINT ended


def main(arguments: Sequence[str] | None = None, *, program: str = "flexdilated") -> int:
    """Run one command; `program` is what starts it, as the help names it.

    The exit status: 0 done, 1 does not work here, 2 bad usage, 130 interrupted, 141 unread.
    """
    return written(lambda: _run(arguments, program))


def _run(arguments: Sequence[str] | None, program: str) -> int:
    try:
        _require_command(sys.argv[1:] if arguments is None else arguments)
        options = _parser(program).parse_args(arguments)
        require_open()
        return options.command(options)
    except UsageError as error:
        tell(str(error))
        return 2
    except UnicodeEncodeError as error:
        tell(
            f"the output needs more characters than {error.encoding} has, such as those of UTF-8, which "
            f"PYTHONIOENCODING=utf-8 chooses; got {error.object[error.start]!a}"
        )
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return _INTERRUPTED


def _require_command(arguments: Sequence[str]) -> None:
    """Raise UsageError, with the command that is likely to be meant, where the first argument is none."""
    name = arguments[0] if arguments else "-"
    if name.startswith("-") or name in _COMMANDS:
        return
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, _COMMANDS, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"no command is called {name[:64]!r}: {meant}There are {', '.join(_COMMANDS)}")


def _parser(program: str) -> CommandParser:
    parser = CommandParser(prog=program, description="Sparse attention over long sequences.")
    parser.add_argument("--version", action="version", version=f"flexdilated {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (purpose, arguments) in _COMMANDS.items():
        arguments.add_arguments(commands.add_parser(name, help=purpose))
    return parser
