"""CommandParser: an option states its limits, what it needs and what it has no effect with; UsageError: a refusal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class UsageError(Exception):
    """The command cannot do what it was asked to: the rule and what came, in one line; it ends with status 2."""


class Relation(NamedTuple):
    """What an argument states of others, by their `dest`. In `excludes`, "device=cuda" is only that value of one."""

    needs: tuple[str, ...]
    excludes: tuple[str, ...]


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that knows which arguments were given, and refuses those that have no effect together."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.relations: dict[str, Relation] = {}
        self._shown: dict[str, str] = {}
        self._unless_given: dict[str, Any] = {}
        self._limits: dict[str, tuple[float | None, float | None]] = {}
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
        """As `add_argument`; refused without all of `needs`, beside any of `excludes`, and beyond `least` or `most`."""
        text = help.replace("%(default)s", str(default))
        action = (group or self).add_argument(*names, default=argparse.SUPPRESS, help=text, **how)
        if default is None and isinstance(action, argparse._StoreTrueAction):
            default = False
        self.relations[action.dest] = Relation(tuple(needs), tuple(excludes))
        self._shown[action.dest] = next((name for name in names if name.startswith("--")), how.get("metavar", names[0]))
        self._unless_given[action.dest] = default
        self._limits[action.dest] = least, most

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]: one in place of the overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Raises UsageError for arguments that do not go together; others that are wrong end with the usage."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = ", ".join(shown for shown in self._shown.values() if shown.startswith("--"))
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; there are {options}" if options else ""))
        given = [name for name in self.relations if hasattr(found, name)]
        for name, value in self._unless_given.items():
            if name not in given:
                setattr(found, name, value)
        for refusal in self._refusals(found, given):
            raise UsageError(refusal)
        return found, rest

    def _refusals(self, options: argparse.Namespace, given: Sequence[str]) -> Iterator[str]:
        for name in given:
            (least, most), value = self._limits[name], getattr(options, name)
            if least is not None and value < least:
                yield f"{self._shown[name]} must be at least {least}; got {value}"
            if most is not None and value > most:
                yield f"{self._shown[name]} must be at most {most}; got {value}"
        for name in given:
            relation, shown = self.relations[name], self._shown[name]
            for other in relation.excludes:
                dest, equals, value = other.partition("=")
                if (equals and getattr(options, dest) == value) or (not equals and dest in given):
                    with_what = self._shown[dest] + (f" {value}" if equals else "")
                    yield f"{shown} has no effect with {with_what}: leave one of them out"
            for other in relation.needs:
                if other not in given:
                    yield f"{shown} needs {self._shown[other]}; got it without"
