"""The jobs of `doctor --verify` on one process: each engine, what a call can do, each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import masks
from .._attend import attend
from ..engines.flex._flex import missing_compiler
from ..masks import Mixture, Pattern
from ..nn import BlockSparseAttention, DilatedAttention, LongNet, LongNetConfig, MultiheadDilatedAttention
from ._verify_measure import Measured, gradients, measure
from ._verify_problem import BRANCHES, HEAD_DIM, HEADS, TOKENS, Problem, causal, dilated, documents, error_of, window

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_LEFT = 99
_DECODED = 64  # tokens that go through a model one by one


@dataclass(frozen=True)
class Job:
    """Something to try on a device; `skipped` says why it cannot be tried here."""

    name: str
    run: Callable[[torch.device], Measured]
    device: torch.device
    skipped: str | None = None


def jobs(device: torch.device) -> Iterator[Job]:
    """All that runs on this device, engines first."""
    yield from _engines(device)
    for name, run in {
        "attend, causal": _causal,
        "attend, documents at run time": _documents,
        "attend, grouped heads": _grouped,
        "BlockSparseAttention": _block_sparse,
        "DilatedAttention": _dilated,
        "MultiheadDilatedAttention": _multihead,
        "LongNet": _longnet,
        "KVCache, decode as prefill": _decoding,
    }.items():
        yield Job(name, run, device)


def _engines(device: torch.device) -> Iterator[Job]:
    if device.type == "cpu":
        yield Job("engine tiles", lambda device: _longnet_pattern(device, "tiles"), device)
        yield Job("engine flex, inference", _flex_inference, device, missing_compiler())
        yield Job("engine reference", lambda device: _longnet_pattern(device, "reference"), device)
    else:
        yield Job("engine flex", lambda device: _longnet_pattern(device, "flex"), device)


def _pattern() -> Mixture | Pattern:
    return masks.longnet(*BRANCHES) & masks.causal()


def _longnet_pattern(device: torch.device, engine: str) -> Measured:
    return trained(lambda q, k, v: attend(q, k, v, _pattern(), engine=engine), Problem.of(dilated()), device)


def _flex_inference(device: torch.device) -> Measured:
    """One set pattern, without gradients: what flex serves on the CPU."""
    segments, rates = (each[1:] for each in BRANCHES)
    problem, pattern = Problem.of(dilated(segments, rates)), masks.longnet(segments, rates) & masks.causal()
    (q, k, v), exact = problem.inputs(device), problem.exact()[0]
    with torch.no_grad():
        return _without_backward(lambda: attend(q, k, v, pattern, engine="flex"), exact, device)


def _causal(device: torch.device) -> Measured:
    return trained(lambda q, k, v: attend(q, k, v, masks.causal()), Problem.of(causal()), device)


def _documents(device: torch.device) -> Measured:
    ids = torch.arange(3).repeat_interleave(torch.tensor([300, 250, TOKENS - 550]))
    bindings = {"documents": ids.to(device)}
    pattern = masks.documents("documents") & masks.causal()
    return trained(lambda q, k, v: attend(q, k, v, pattern, bindings=bindings), Problem.of(documents(ids)), device)


def _grouped(device: torch.device) -> Measured:
    problem = Problem.of(dilated(), kv_heads=HEADS // 2)
    return trained(lambda q, k, v: attend(q, k, v, _pattern(), enable_gqa=True), problem, device)


def _block_sparse(device: torch.device) -> Measured:
    module = BlockSparseAttention(masks.local_window(left=_LEFT, right=0)).to(device)
    return trained(module, Problem.of(window(_LEFT)), device)


def _dilated(device: torch.device) -> Measured:
    return trained(DilatedAttention(*BRANCHES, causal=True).to(device), Problem.of(dilated()), device)


def _multihead(device: torch.device) -> Measured:
    """One branch over all tokens is what torch's own module computes, with the same parameters."""
    width = HEADS * HEAD_DIM
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        theirs = nn.MultiheadAttention(width, HEADS, batch_first=True, dtype=torch.float64)
    ours = MultiheadDilatedAttention(width, HEADS, [TOKENS], [1], causal=True, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x, grad = torch.randn(2, 1, TOKENS, width, generator=generator, dtype=torch.float64)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def exact(x: Tensor) -> Tensor:
        return theirs(x, x, x, attn_mask=later, need_weights=False)[0]

    ours = ours.to(device)
    return _as_one_input(lambda x: ours(x, x, x)[0], exact, x, grad, device)


def _longnet(device: torch.device) -> Measured:
    """The model in float32, against itself in float64 with the reference engine."""
    model = _model()
    exact = LongNet(replace(model.config, engine="reference"), dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 1, 300, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    return _as_one_input(model.to(device), exact, x, grad, device)


@torch.no_grad()
def _decoding(device: torch.device) -> Measured:
    """Tokens that go through one by one, after some at once, give what all at once give."""
    model = _model().to(device)
    x = torch.randn(1, 300, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(device)
    whole = model(x)[:, -_DECODED:]

    def decode() -> Tensor:
        caches = model.new_caches()
        model(x[:, :-_DECODED], caches=caches)
        return torch.cat([model(token, caches=caches) for token in x[:, -_DECODED:].split(1, dim=1)], dim=1)

    return _without_backward(decode, whole, device)


def _model() -> LongNet:
    config = LongNetConfig(
        vocab_size=None,
        embed_dim=HEADS * HEAD_DIM,
        depth=2,
        num_heads=HEADS,
        segment_lengths=BRANCHES[0],
        dilation_rates=BRANCHES[1],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LongNet(config)


def trained(attention: Attention, problem: Problem, device: torch.device) -> Measured:
    """Forward and backward of attention over q, k and v, against the problem's exact results."""
    inputs = problem.inputs(device)

    def forward() -> Tensor:
        return attention(*inputs)

    return _both_ways(forward, inputs, problem.grad, problem.exact(), device)


def _as_one_input(
    ours: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    x: Tensor,
    grad: Tensor,
    device: torch.device,
) -> Measured:
    wanted = x.clone().requires_grad_()
    out = exact(wanted)
    results = (out.detach(), *torch.autograd.grad(out, wanted, grad))
    given = x.to(device, torch.float32).requires_grad_()
    return _both_ways(lambda: ours(given), (given,), grad, results, device)


def _both_ways(
    forward: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    exact: Sequence[Tensor],
    device: torch.device,
) -> Measured:
    out = forward()
    error = error_of((out, *gradients(out, grad, inputs)), exact)
    del out  # before memory is looked at
    return Measured(error, *measure(forward, lambda out: gradients(out, grad, inputs), device))


def _without_backward(forward: Callable[[], Tensor], exact: Tensor, device: torch.device) -> Measured:
    error = error_of((forward(),), (exact,))
    return Measured(error, *measure(forward, None, device))
