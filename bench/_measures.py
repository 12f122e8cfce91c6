"""A measure is a function under a name, with its sizes, that gives rows, each against its target."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from inspect import signature
from math import nan
from statistics import median
from textwrap import shorten
from typing import Any, Literal, TypeVar


@dataclass(frozen=True)
class Timing:
    """Seconds of each run of one job."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    def to_data(self) -> dict[str, Any]:
        """`spread_s` is the slowest run minus the fastest."""
        spread = max(self.seconds) - min(self.seconds)
        return {"name": self.name, "repeats": len(self.seconds), "median_s": self.median_s, "spread_s": spread}


@dataclass(frozen=True)
class Target:
    """A bound on a measured number; both ends of "≥" and "≤" are included."""

    sense: Literal["≥", "≤"]
    bound: float
    unit: str = ""

    def met_by(self, measured: float) -> bool:
        return measured >= self.bound if self.sense == "≥" else measured <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {with_unit(self.bound, self.unit)}"


def at_least(bound: float, unit: str = "") -> Target:
    return Target("≥", bound, unit)


def at_most(bound: float, unit: str = "") -> Target:
    return Target("≤", bound, unit)


def with_unit(number: float, unit: str) -> str:
    """Three significant digits, without exponents between 1e-4 and 1e3."""
    text = f"{number:.3g}" if 1e-4 <= abs(number) < 1e3 or number == 0 else f"{number:,.0f}"
    return f"{text} {unit}".rstrip()


@dataclass(frozen=True)
class Row:
    """One measured number; `detail` is plain data that explains it, `not_verified` the checks that failed of it."""

    measure: str
    target: Target
    measured: float
    timings: tuple[Timing, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    not_verified: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        return self.target.met_by(self.measured)

    def to_data(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "target": str(self.target),
            "measured": self.measured,
            "measured_text": with_unit(self.measured, self.target.unit),
            "met": self.met,
            "timings": [timing.to_data() for timing in self.timings],
            "detail": dict(self.detail),
            **({"not_verified": list(self.not_verified)} if self.not_verified else {}),
        }


@dataclass(frozen=True)
class Gap:
    """A row without a number, and the reason."""

    measure: str
    target: Target
    reason: str

    def to_data(self) -> dict[str, Any]:
        text = shorten(self.reason.partition("\n")[0], 120, placeholder=" ...")
        data = Row(self.measure, self.target, nan, detail={"reason": self.reason}).to_data()
        return data | {"measured": None, "measured_text": f"not measured: {text}", "met": None}


Answer = Iterable[Row | Gap | Mapping[str, Any]]  # a mapping is a point of a plot: plain data without a target


@dataclass(frozen=True)
class Measure:
    """A function that verifies, then measures, and its arguments at full and at tiny sizes.

    `code`: the row of the project's targets, another name for it; README shows measures that have one, and the sweep.
    """

    name: str
    run: Callable[..., Answer]
    full: Mapping[str, Any]
    small: Mapping[str, Any]
    code: str = ""

    @property
    def question(self) -> str:
        return (self.run.__doc__ or "").splitlines()[0]

    def answer(self, *, small: bool) -> dict[str, Any]:
        """Arguments, rows and points, as plain data."""
        arguments = self.small if small else self.full
        found = list(self.run(**arguments))
        return {
            "config": {name: _as_data(value) for name, value in arguments.items()},
            "rows": [row.to_data() for row in found if isinstance(row, Row | Gap)],
            "points": [dict(point) for point in found if isinstance(point, Mapping)],
        }


REGISTERED: list[Measure] = []
_F = TypeVar("_F", bound=Callable[..., Answer])


def measure(code: str = "", **tiny: Any) -> Callable[[_F], _F]:
    """Declare a measure: its name is the function's, its question the first line of the docstring.

    The defaults are the full sizes; `tiny` replaces some of them where only the code is tried.
    """

    def register(function: _F) -> _F:
        full = {name: parameter.default for name, parameter in signature(function).parameters.items()}
        REGISTERED.append(Measure(function.__name__, function, full, full | tiny, code))
        return function

    return register


def _as_data(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_as_data(each) for each in value] if isinstance(value, tuple | list) else value
