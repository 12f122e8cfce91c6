"""Entry point of the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from .. import __version__
from ._check import add_arguments as add_check_arguments
from ._device import add_doctor_arguments, add_tune_arguments
from ._plan import add_arguments as add_plan_arguments
from ._show import add_explain_arguments, add_show_arguments
from ._terminal import CommandParser, UsageError, print_error, status_of

_COMMANDS = {
    "show": ("draw a pattern as a heat map, and say what it allows and costs", add_show_arguments),
    "explain": ("say why a query sees a key, or why not", add_explain_arguments),
    "plan": (
        "print how a pattern is computed, its cost, and the longest sequence that fits",
        add_plan_arguments,
    ),
    "check": ("check a pattern against its definition, and attend against dense attention", add_check_arguments),
    "tune": ("measure the constants of this device, and write them to a file", add_tune_arguments),
    "doctor": ("say what works on this machine, and what is missing", add_doctor_arguments),
}
_INTERRUPTED = 130  # what shells report of a process that SIGINT ended


def main(arguments: Sequence[str] | None = None, *, program: str = "flexdilated") -> int:
    """Run the command line and return its exit status.

    arguments: command-line arguments without the program's name; None for those of this process.
    program: name of the program in the help.

    The status is 0 for success; 1 if `check` found a counterexample, or `doctor` a default engine that fails or an
    invalid variable that attention reads; 2 for wrong usage and output that cannot be written; 130 if interrupted; 141
    if the reader of the output closed it. Raises SystemExit for --help, --version and arguments that argparse refuses.
    """
    return status_of(lambda: _run(sys.argv[1:] if arguments is None else arguments, program))


def _run(arguments: Sequence[str], program: str) -> int:
    try:
        name = arguments[0] if arguments else "-"
        if not (name.startswith("-") or name in _COMMANDS):
            near = get_close_matches(name, _COMMANDS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"no command is called {name[:64]!r}: {meant}There are {', '.join(_COMMANDS)}")
        options = _parser(program).parse_args(arguments)
        return options.command(options)
    except UsageError as error:
        print_error(str(error))
        return 2
    except UnicodeEncodeError as error:
        print_error(
            f"the output needs more characters than {error.encoding} has, such as those of UTF-8, which "
            f"PYTHONIOENCODING=utf-8 chooses; got {error.object[error.start]!a}"
        )
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return _INTERRUPTED


def _parser(program: str) -> CommandParser:
    parser = CommandParser(prog=program, description="Sparse attention over long sequences.")
    parser.add_argument("--version", action="version", version=f"flexdilated {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (purpose, add_arguments) in _COMMANDS.items():
        add_arguments(commands.add_parser(name, help=purpose))
    return parser
