"""What a measure is: a function under a name, with its sizes, that gives rows, each against its target."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from inspect import signature
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

    @property
    def spread_s(self) -> float:
        """Slowest run minus fastest."""
        return max(self.seconds) - min(self.seconds)

    def to_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "repeats": len(self.seconds),
            "median_s": self.median_s,
            "spread_s": self.spread_s,
        }


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


@dataclass(frozen=True)
class Row:
    """One line of the table; `detail` is plain data that explains the number.

    `not_verified` says which checks failed of what the number depends on.
    """

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


DARCSTAR = "DarcStar-Solutions-Tech/dilated-attention-pytorch"


@dataclass(frozen=True)
class Claim:
    """`says`, in our words, and `claimed`, its figure, are the source's; `here` is what is measured in its stead."""

    says: str
    claimed: str
    source: str
    here: str
    target: Target

    def row(self, measured: float, timings: tuple[Timing, ...] = (), **detail: Any) -> Row:
        """The claim with what was measured."""
        return Row(
            self.says, self.target, measured, timings, {"claimed": self.claimed, "source": self.source, **detail}
        )


@dataclass(frozen=True)
class Gap:
    """A line of the table without a number, and why there is none."""

    measure: str
    target: Target
    reason: str

    def to_data(self) -> dict[str, Any]:
        first_line = self.reason.partition("\n")[0]
        return {
            "measure": self.measure,
            "target": str(self.target),
            "measured": None,
            "measured_text": f"not measured: {shorten(first_line, 120, placeholder=' ...')}",
            "met": None,
            "timings": [],
            "detail": {"reason": self.reason},
        }


def with_unit(number: float, unit: str) -> str:
    """Three significant digits, without exponents for what people read as plain numbers."""
    text = f"{number:.3g}" if 1e-4 <= abs(number) < 1e3 or number == 0 else f"{number:,.0f}"
    return f"{text} {unit}".rstrip()


Answer = Iterable[Row | Gap | Mapping[str, Any]]  # a mapping is a point of a plot: plain data without a target


@dataclass(frozen=True)
class Measure:
    """A function that verifies, then measures, and its arguments in full and at tiny sizes.

    `code` is the short name it had before, still accepted; README shows those that have one, and the sweep.
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
            "config": {name: as_data(value) for name, value in arguments.items()},
            "rows": [row.to_data() for row in found if isinstance(row, Row | Gap)],
            "points": [dict(point) for point in found if isinstance(point, Mapping)],
        }


REGISTERED: list[Measure] = []
_F = TypeVar("_F", bound=Callable[..., Answer])


def measure(code: str = "", **tiny: Any) -> Callable[[_F], _F]:
    """Register a function under its own name. The first line of its docstring is the question that it answers.

    Its defaults are what is measured; `tiny` stands in their place where only is to be seen that everything runs.
    """

    def register(function: _F) -> _F:
        full = {name: parameter.default for name, parameter in signature(function).parameters.items()}
        REGISTERED.append(Measure(function.__name__, function, full, full | tiny, code))
        return function

    return register


def as_data(value: Any) -> Any:
    """A configuration as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [as_data(each) for each in value] if isinstance(value, tuple | list) else value
