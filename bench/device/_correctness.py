"""Correct first: odd cases against the dense float64 reference, each within a stated budget, and the device's tests."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from .._measures import Gap, Row, at_most
from ._device import Expression, Way, Where, attend_on, inference, ways

# Relative errors of out, dq, dk and dv. float32 products are exact to 1e-6, their sums to some 1e-5; bfloat16
# operands round to 4e-3.
BUDGETS = {"float32": 1e-4, "bfloat16": 2e-2}
# Absolute error of lse, whose inputs are rounded before either side sees them. Base 2 in place of e is off by 0.69.
LSE_BUDGET = 2e-3

QUESTION = "Are output, lse and gradients right on this device, on the odd cases?"

_LEAST_ENTRY = 1e-2  # inputs are standard normal

_TARGET = at_most(1, "of the budget")


def _nothing(_: str) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Call:
    """One call of attend. `options` makes its tensors for a device; `keys` and `kv_heads` are q's by default."""

    pattern: Expression
    tokens: int
    dtype: str = "bfloat16"
    head_dim: int = 64
    heads: int = 4
    kv_heads: int | None = None
    keys: int | None = None
    batch: int = 1
    options: Callable[[str], Mapping[str, Any]] = _nothing
    through_lse: bool = False
    in_layout: bool = False
    transposed: bool = False
    compiled: bool = False

    @property
    def has_score_mod(self) -> bool:
        return "score_mod" in self.options("cpu")


@dataclass(frozen=True)
class Case:
    """Calls in this order in one process. `about` names the figures that it bears on, if any."""

    name: str
    calls: tuple[Call, ...]
    about: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether any way can run it: one that is no more than q, k, v and a pattern."""
        odd = (call.in_layout or call.compiled or call.through_lse or call.options("cpu") for call in self.calls)
        return not any(odd)


def _alibi(device: str) -> Mapping[str, Any]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)

    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return {"score_mod": score_mod}


def _sinks(device: str) -> Mapping[str, Any]:
    return {"sinks": torch.tensor([0.0, 1.5, -2.0, 4.0], device=device)}


def _lengths(device: str) -> Mapping[str, Any]:
    return {"bindings": {"lengths": torch.tensor([333, 500], device=device)}}


def _packing(*lengths: int) -> Callable[[str], Mapping[str, Any]]:
    def make(device: str) -> Mapping[str, Any]:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return {"bindings": {"documents": ids.to(device)}}

    return make


def _shifted(_: str) -> Mapping[str, Any]:
    return {"q_offset": 900, "k_offset": 256}


_WINDOW = masks.local_window(left=100, right=37)
_NARROW = masks.local_window(left=9, right=0)
_LONGNET = masks.longnet(segment_lengths=(64, 256), dilation_rates=(1, 4))
_CAUSAL = _LONGNET & masks.causal()
_UNEVEN = masks.longnet(segment_lengths=(100, 333), dilation_rates=(3, 7))
_BOTH_KINDS = (masks.local_window(left=300, right=300) | masks.global_tokens(130)) & masks.causal()
_REAL = _LONGNET & masks.lengths("lengths")
_ANEW = _CAUSAL.per_document("documents")
_WINDOW_CALL = Call(_WINDOW, 1000, "float32")


CASES = (
    Case("window, odd length", (_WINDOW_CALL,), "set"),
    Case("causal, head dim 128", (Call(masks.causal(), 777, head_dim=128),), "set"),
    Case("blocks of tokens", (Call(masks.blockwise(masks.local_window(left=2, right=1), 128), 1024),), "set"),
    Case("partial and full lists of unlike width", (Call(_BOTH_KINDS, 1500, "float32"),), "set"),
    Case("one token", (Call(_WINDOW, 1), Call(_CAUSAL, 1)), "longnet"),
    Case("no pair at all", (Call(masks.dilated(4, 8, 5), 130, heads=2),), "set"),
    Case("hidden rows, rate not dividing segment", (Call(masks.dilated(100, 7, 3), 1023, "float32", 48),), "longnet"),
    Case("mixture, causal, head dim 128", (Call(_CAUSAL, 1100, head_dim=128, heads=8),), "longnet"),
    Case("mixture, rates not dividing segments", (Call(_UNEVEN, 1000, "float32", heads=5),), "longnet"),
    Case("mixture, head dim 48", (Call(_LONGNET, 700, head_dim=48),), "longnet"),
    Case("mixture, grouped keys", (Call(_CAUSAL, 640, heads=8, kv_heads=2),), "longnet"),
    Case("gradient through lse", (Call(_LONGNET, 640, "float32", through_lse=True),), "longnet"),
    Case("later queries, later keys", (Call(_CAUSAL, 300, "float32", keys=944, options=_shifted),), "offsets"),
    Case("already in the layout", (Call(_CAUSAL, 640, in_layout=True),)),
    Case("tokens outermost in memory", (Call(_CAUSAL, 640, transposed=True),)),
    Case("other parameters, same code", (_WINDOW_CALL, replace(_WINDOW_CALL, pattern=_NARROW))),
    Case("other lengths, same pattern", tuple(Call(_CAUSAL, tokens, "float32") for tokens in (640, 515, 1290))),
    Case("in one compiled graph", (Call(_CAUSAL, 500, compiled=True),)),
    Case("sinks", (Call(_CAUSAL, 515, options=_sinks),)),
    Case("score_mod", (Call(_WINDOW, 515, "float32", options=_alibi),)),
    Case("lengths of a batch", (Call(_REAL, 500, batch=2, options=_lengths),)),
    Case("documents", (Call(_ANEW, 600, options=_packing(1, 250, 349)), Call(_ANEW, 600, options=_packing(500, 100)))),
)  # fmt: skip


def draw(call: Call, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, the same on every device."""
    generator = torch.Generator().manual_seed(call.tokens)
    keys, kv_heads = call.keys or call.tokens, call.kv_heads or call.heads
    shapes = [(call.heads, call.tokens), (kv_heads, keys), (kv_heads, keys), (call.heads, call.tokens)]
    drawn = [torch.randn(call.batch, *shape, call.head_dim, generator=generator) for shape in shapes]
    q, k, v, grad = (x.to(device, getattr(torch, call.dtype)) for x in drawn)
    if call.transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return q, k, v, grad


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
    """A line of the table, and the figures that it invalidates.

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


# The test suite's own tests for accelerators, where what they need is installed.

_ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("pytest", "hypothesis", "beartype", "jaxtyping", "pytest_timeout", "matplotlib", "tqdm")
_MEASURE = "tests marked device: failures and errors"
_NONE = at_most(0)
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?)\b")


def run_device_tests(where: Where, limit_s: float) -> Row | Gap:
    """How many fail; a Gap where they cannot run."""
    if not where.is_cuda:
        return Gap(_MEASURE, _NONE, "they need a CUDA device")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return Gap(_MEASURE, _NONE, f"not installed: {', '.join(missing)}")
    files = [str(path) for path in sorted((_ROOT / "tests").glob("test_*.py")) if "mark.device" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Gap(_MEASURE, _NONE, f"no result within {limit_s:.0f} s")
    return read_outcome(done.stdout)


def read_outcome(printed: str) -> Row | Gap:
    """The row that pytest's last line tells; a Gap if it ran nothing."""
    last = printed.rstrip().rpartition("\n")[2]
    counts = {word.rstrip("s"): int(number) for number, word in _COUNTS.findall(last)}
    wrong = counts.get("failed", 0) + counts.get("error", 0)
    if not wrong and not counts.get("passed", 0):
        return Gap(_MEASURE, _NONE, f"pytest ran nothing: {last}")
    return Row(_MEASURE, _NONE, wrong, detail={"passed": counts.get("passed", 0), "printed": printed[-4000:]})
