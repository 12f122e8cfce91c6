"""What a row of the suite is: a function of the device, with its sizes, its targets, and what its figures depend on."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._jobs import Size
from .._measures import Gap, Row, Target, as_data
from .._rules import LONGNET_5
from ._device import Where

Answer = Iterable[Row | Gap]

# What most rows share: LongNet-5 at 128 K tokens, and what stands for it in a dry run.
BOTH = (LONGNET_5, LONGNET_5.as_causal())
LARGE = Size(128 * 1024, num_heads=16, head_dim=128)
TINY = LONGNET_5.shrunk(64)
TINY_SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)
FORWARD = ("longnet forward",)
TRAINING = ("longnet forward", "longnet backward")


@dataclass(frozen=True)
class DeviceRow:
    """`code`, its short name, is accepted too. `targets` are those of its rows, in the order of docs/device.md.

    `needs` names what must be right for its figures to count. `rehearsed`: it is run once beforehand, beside others,
    to compile. Those that compile what another one does are not, nor those that need the device's memory for
    themselves.
    """

    name: str
    code: str
    run: Callable[..., Answer]
    full: Mapping[str, Any]
    small: Mapping[str, Any]
    targets: tuple[Target, ...]
    needs: tuple[str, ...]
    limit_s: float
    rehearsed: bool

    @property
    def question(self) -> str:
        return (self.run.__doc__ or "").splitlines()[0]

    def answer(self, where: Where, *, small: bool) -> dict[str, Any]:
        arguments = self.small if small else self.full
        rows = [row.to_data() for row in self.run(where, **arguments)]
        return {"config": {name: as_data(value) for name, value in arguments.items()}, "rows": rows}

    def rehearsals(self, *, small: bool) -> list[dict[str, Any]]:
        """Arguments of one part each, so that the parts compile side by side; none if it is not rehearsed."""
        if not self.rehearsed:
            return []
        options = dict(self.small if small else self.full)
        options["size"] = replace(options["size"], repeats=1)
        for name in ("specs", "windows", "branches"):
            if name in options:
                return [{**options, name: (part,)} for part in options[name]]
        return [options]


REGISTERED: list[DeviceRow] = []


def device_row(
    code: str,
    *targets: Target,
    full: Mapping[str, Any],
    small: Mapping[str, Any],
    needs: tuple[str, ...],
    limit_s: float,
    rehearsed: bool = False,
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register a function of (where, **arguments) under its own name."""

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        row = DeviceRow(function.__name__, code, function, full, small, targets, needs, limit_s, rehearsed)
        REGISTERED.append(row)
        return function

    return register
