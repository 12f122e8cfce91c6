"""Output, lse and gradients of the odd cases against the dense float64 reference, each within a stated budget."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from .._result import Gap, Row, at_most
from ._cases import CASES, Call, Case, draw
from ._ways import Way, attend_on, inference, ways
from ._where import Where

# Relative errors of out, dq, dk and dv. float32 products are exact to 1e-6, their sums to some 1e-5; bfloat16
# operands round to 4e-3.
BUDGETS = {"float32": 1e-4, "bfloat16": 2e-2}
# Absolute error of lse, whose inputs are rounded before either side sees them. Base 2 in place of e is off by 0.69.
LSE_BUDGET = 2e-3

QUESTION = "Are output, lse and gradients right on this device, on the odd cases?"

_LEAST_ENTRY = 1e-2  # inputs are standard normal

_TARGET = at_most(1, "of the budget")


@dataclass(frozen=True)
class Trial:
    """A case and a way, by their names: what another process needs to know."""

    case: str
    way: str

    @property
    def measure(self) -> str:
        return f"{self.case}, {self.way}"


@dataclass(frozen=True)
class Verdict:
    """A line of the table, and which figures it takes the ground from.

    `refused`: the way does not serve the pattern and says so, which is no fault.
    """

    row: Row | Gap
    spoils: tuple[str, ...] = ()
    refused: bool = False


def trials(where: Where) -> list[Trial]:
    """Every case in the default way, and the plain ones in every other way that exists."""
    _, *others = (way for way in ways(where) if way.missing is None)
    plain = [case for case in CASES if case.is_plain]
    return [Trial(case.name, _default(case, where).name) for case in CASES] + [
        Trial(case.name, way.name) for way in others for case in plain
    ]


def _default(case: Case, where: Where) -> Way:
    """The way that serves every case; on CPU a score_mod needs FlexAttention, which has a forward only there."""
    return inference(where) if any(call.has_score_mod for call in case.calls) else ways(where)[0]


def judge(trial: Trial, where: Where) -> Verdict:
    """Run the calls of a case; the worst error over its budget is the measured number."""
    case = next(case for case in CASES if case.name == trial.case)
    way = next(way for way in (*ways(where), inference(where)) if way.name == trial.way)
    figures = () if case.about is None else (f"{case.about} forward", f"{case.about} backward")
    shares: dict[str, float] = {}
    try:
        for index, call in enumerate(case.calls):
            prefix = f"call {index + 1}, " if len(case.calls) > 1 else ""
            shares |= {prefix + name: share for name, share in _shares(call, way, where).items()}
    except ValueError as error:
        refused = way != _default(case, where)  # which serves all
        row = Gap(trial.measure, _TARGET, f"{type(error).__name__}: {error}")
        return Verdict(row, () if refused else figures, refused)
    row = Row(trial.measure, _TARGET, _worst(shares.values()), detail={"share_of_budget": shares})
    return Verdict(row, tuple(_spoiled(shares, figures)))


def failure(trial: Trial, reason: str) -> Verdict:
    """The verdict on a case that ended without numbers."""
    about = next(case for case in CASES if case.name == trial.case).about
    spoils = () if about is None else (f"{about} forward", f"{about} backward")
    return Verdict(Gap(trial.measure, _TARGET, reason), spoils)


def summary(verdicts: Sequence[Verdict]) -> list[Row | Gap]:
    """The worst of all that gave numbers, with every number behind it; then each that is wrong or gave none."""
    rows = [verdict.row for verdict in verdicts]
    measured = [row for row in rows if isinstance(row, Row)]
    bad = [
        verdict.row
        for verdict in verdicts
        if not verdict.refused and (isinstance(verdict.row, Gap) or not verdict.row.met)
    ]
    worst = _worst(row.measured for row in measured)
    detail = {row.measure: row.to_data()["detail"] for row in rows}
    which = f"{len(measured)} of {len(rows)} odd cases"
    return [Row(f"worst error of out, lse, dq, dk, dv in {which}", _TARGET, worst, detail=detail), *bad]


def _worst(shares: Iterable[float]) -> float:
    """The largest; not a number if one of them is not, which max() might pass over, or if there is none."""
    return max(shares, key=lambda share: (share != share, share), default=torch.nan)


def _spoiled(shares: Mapping[str, float], figures: tuple[str, ...]) -> Iterator[str]:
    """A wrong forward spoils both, a wrong gradient the backward alone. NaN is above any bound."""
    wrong = [name.split(", ")[-1] for name, share in shares.items() if not share <= 1]
    for figure in figures:
        if any(name in ("out", "lse") or figure.endswith("backward") for name in wrong):
            yield figure


def _shares(call: Call, way: Way, where: Where) -> dict[str, float]:
    """Errors over their budgets, by name."""
    got = _run(call, way, where.device)
    wanted = _run(call, None, "cpu")
    shares = {}
    for name, value in got.items():
        if name == "lse":
            shares[name] = _lse_error(value, wanted[name]) / LSE_BUDGET
        else:
            shares[name] = _error(value, wanted[name]) / BUDGETS[call.dtype]
    return shares


def _run(call: Call, way: Way | None, device: str) -> dict[str, Tensor]:
    """out, lse and gradients by name, on the CPU; without a way, the float64 reference's."""
    q, k, v, grad = draw(call, device)
    if way is None:
        q, k, v, grad = (x.double() for x in (q, k, v, grad))
    options = dict(call.options(device))
    forward_only = way is not None and way.engine == "flex" and device == "cpu"
    leaves = {name: x.detach().requires_grad_(not forward_only) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if "sinks" in options:
        leaves["dsinks"] = options["sinks"] = options["sinks"].requires_grad_()
    if forward_only:
        with torch.no_grad():  # FlexAttention on CPU has no backward, and gives no lse
            return {"out": fd.attend(q, k, v, call.pattern, engine="flex", **options)}
    out, lse = _attend(call, way, leaves["dq"], leaves["dk"], leaves["dv"], options)
    outputs, grads = (out, lse) if call.through_lse else (out,), (grad, grad[..., 0].to(lse.dtype))
    found = torch.autograd.grad(outputs, list(leaves.values()), grads[: len(outputs)])
    return {"out": out.detach().cpu(), "lse": lse.detach().cpu()} | {
        name: x.cpu() for name, x in zip(leaves, found, strict=True)
    }


def _attend(
    call: Call, way: Way | None, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse); the reference takes neither layouts nor graphs, which change nothing of what is computed."""
    options["enable_gqa"] = call.kv_heads is not None
    if way is None:
        return fd.attend(q, k, v, call.pattern, engine="reference", return_lse=True, **options)
    if way.backend is not None:
        out, lse = attend_on(way.backend, q, k, v, call.pattern, return_lse=True)
        assert lse is not None
        return out, lse
    layout = masks.layout(call.pattern, call.tokens) if call.in_layout else None
    if layout is not None:
        q, k, v = (layout.apply(x) for x in (q, k, v))
    options |= {"engine": way.engine, "layout": layout}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fd.attend(q, k, v, call.pattern, return_lse=True, **options)

    run = torch.compile(attend, fullgraph=True, dynamic=False) if call.compiled else attend
    out, lse = run(q, k, v)
    return (out, lse) if layout is None else (layout.invert(out), layout.invert(lse, dim=-1))


def _error(got: Tensor, wanted: Tensor) -> float:
    """Relative, but to no less than a small number an entry: what is 0 but for rounding has no scale."""
    least = _LEAST_ENTRY * wanted.numel() ** 0.5
    return float((got.double() - wanted).norm()) / max(float(wanted.norm()), least)


def _lse_error(got: Tensor, wanted: Tensor) -> float:
    """The largest; infinite unless the same rows are empty."""
    empty = wanted == -torch.inf
    if not torch.equal(got == -torch.inf, empty):
        return torch.inf
    return float((got.double() - wanted).masked_fill(empty, 0.0).abs().max())
