"""Are output and gradients as exact as dense attention's own?"""

from dataclasses import dataclass

import torch
from torch import Tensor

import flexdilated as fd

from ._longnets import LONGNET_4, LongNet, dense
from ._oracle import Rule, by_definition, relative_error
from ._problem import Problem, Size
from ._result import Result, Row, at_most

_NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Config:
    """Each LongNet at one size, which must allow an N x N matrix in float64."""

    specs: tuple[LongNet, ...]
    size: Size


FULL = Config((LONGNET_4.shrunk(8), LONGNET_4.shrunk(8).as_causal()), Size(2048, num_heads=2))
SMALL = Config((LONGNET_4.shrunk(64), LONGNET_4.shrunk(64).as_causal()), Size(256, num_heads=4, head_dim=16))


def run(config: Config) -> Result:
    """C8: relative error against float64 over dense SDPA's own at the same size, the worst of all."""
    return Result(tuple(_row(config, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)))


def _row(config: Config, dtype: torch.dtype) -> Row:
    detail = {}
    for spec in config.specs:
        everything = dense(config.size.num_tokens, causal=spec.causal)
        # No dense kernel of PyTorch takes a gradient of lse; its plain gradient is the yardstick for both.
        theirs = _errors(None, everything, config.size, dtype, through_lse=False)
        for through_lse in (False, True):
            ours = _errors(spec, spec, config.size, dtype, through_lse=through_lse)
            which = f"{spec.label}, gradient of {'out and lse' if through_lse else 'out'}"
            detail[which] = {name: ours[name] / theirs[name] for name in _NAMES} | {
                "errors": ours,
                "dense": theirs,
            }
    worst = max(entry[name] for entry in detail.values() for name in _NAMES)
    name = str(dtype).removeprefix("torch.")
    return Row(
        f"{name}, {config.size}: error of out, lse, dq, dk, dv over dense SDPA's",
        at_most(2.0, "×"),
        worst,
        detail=detail,
    )


def _errors(spec: LongNet | None, rule: Rule, size: Size, dtype: torch.dtype, *, through_lse: bool) -> dict[str, float]:
    """Relative errors of the library with `spec`, or of dense attention without one, by name."""
    problem = Problem.draw(size)
    rounded = [x.to(dtype) for x in (problem.q, problem.k, problem.v, problem.grad)]
    q, k, v = leaves = [x.detach().requires_grad_() for x in rounded[:3]]
    out, lse = _dense(q, k, v, rule) if spec is None else fd.attend(q, k, v, spec.pattern(), return_lse=True)
    lse_grad = problem.grad[..., 0] if through_lse else None
    got = (out, lse, *_gradients(out, lse, leaves, rounded[3], lse_grad))

    q, k, v = exact = [x[0].detach().double().requires_grad_() for x in rounded[:3]]
    wanted_out, wanted_lse = by_definition(q, k, v, rule, torch.arange(size.num_tokens))
    exact_lse_grad = None if lse_grad is None else lse_grad[0].double()
    gradients = _gradients(wanted_out, wanted_lse, exact, rounded[3][0].double(), exact_lse_grad)
    wanted = (wanted_out, wanted_lse, *gradients)
    return {name: relative_error(a[0], b) for name, a, b in zip(_NAMES, got, wanted, strict=True)}


def _gradients(
    out: Tensor, lse: Tensor, leaves: list[Tensor], out_grad: Tensor, lse_grad: Tensor | None
) -> tuple[Tensor, ...]:
    if lse_grad is None:
        return torch.autograd.grad(out, leaves, out_grad)
    return torch.autograd.grad((out, lse), leaves, (out_grad, lse_grad))


def _dense(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Dense attention with its lse, which the public function keeps to itself."""
    assert isinstance(rule, LongNet)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, rule.causal)
    return out, lse
