"""The kernels that Inductor makes for an H200, in Triton's interpreter, against the dense definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor.runtime import triton_heuristics

import flexdilated as fd
from bench._catalogue import ENTRIES
from bench.device import cases as device_cases
from flexdilated.distributed import Sharding
from flexdilated.engines import PlacedCall
from flexdilated.masks.orders import Placement
from tests.interpreted.cases import KINDS, Case, blocks, in_graph, results, shares
from tests.interpreted.emulated_cuda import CALLED, is_template, require, triton
from tests.interpreted.listed_cases import CATALOGUE, FEATURES
from tests.support import oracle
from tests.support.agreement import gradients

require(interpreted=True)

NAME = "interpreted_kernels"
# One of each structure of kernels and of what is around them; with --all the features meet in pairs.
QUICK = {
    "longnet, in a graph",
    "later queries, grouped, score_mod and sinks, eager",
    "queries from another position in each batch entry, in a graph",
    "one query, in a graph",
    "selected blocks of 256 keys, in a graph",
}


def _cases() -> list:
    every = [*CATALOGUE, *FEATURES, *map(in_graph, (*CATALOGUE, *FEATURES))]
    assert {str(case) for case in every} >= QUICK
    return [
        pytest.param(case, marks=() if str(case) in QUICK else pytest.mark.thorough, id=str(case)) for case in every
    ]


def flex_kernels() -> list[str]:
    """Those made from FlexAttention's templates."""
    return sorted({kernel.fn.__name__ for kernel in CALLED if is_template(kernel)})


@pytest.mark.parametrize("case", _cases())
def test_kernels_match_the_definition(case: Case, record_property) -> None:
    CALLED.clear()
    start = process_time()
    leaves = {name: leaf.to("cuda") for name, leaf in case.leaves().items()}
    found = results(case.attention(), leaves, case.trains)
    kernels = flex_kernels()
    assert any("backward" not in name for name in kernels), "flex_attention ran without its kernel"
    assert case.trains == any("backward" in name for name in kernels), "it was differentiated without its kernel"
    there = blocks(case, case.program(leaves))
    assert {kind for kind in (*KINDS, "three a side", "ragged") if not there[kind]} == set(case.lacks)
    share = shares(case, found)
    assert not {name: each for name, each in share.items() if not each <= 1}
    figures = {"shares": {name: round(each, 3) for name, each in share.items()}, "blocks": there}
    figures |= {"dtype": case.dtype, "head_dim": case.head_dim, "cpu_s": round(process_time() - start, 1)}
    record_property(f"{NAME}: {case}", figures)


@pytest.mark.parametrize("first", [0, 2**31 - 2**16, 2**31 - 400, 2**31 - 200, 2**31 - 1])
@pytest.mark.parametrize(
    "pattern",
    [
        fd.masks.local_window(left=60, right=0),
        fd.masks.local_window(left=2**31 - 1, right=0),
        fd.masks.dilated(128, 4),
        fd.masks.strided(3) | fd.masks.landmark_tokens(64, rows=False),
        fd.masks.custom(lambda b, h, q, k: q * q - k * k >= 0),
    ],
    ids=["window", "wide window", "dilated", "periods", "custom"],
)
def test_masks_are_right_where_positions_outgrow_32_bits(pattern: fd.masks.Pattern, first: int) -> None:
    """Kernels hand over indices of int32. The last two blocks are filled up beyond the last token."""
    places, where = (0, 1, 60, 127, 199, 200, 299), {"num_heads": 1, "q_offset": first, "k_offset": first}
    masks = {device: fd.masks.block_mask(pattern, 300, device=device, **where).mask_mod for device in ("cpu", "cuda")}
    for q, k in product(places, places):
        found, exact = (
            masks[device](*(torch.tensor(index, dtype=dtype, device=device) for index in (0, 0, q, k)))
            for device, dtype in (("cuda", torch.int32), ("cpu", torch.int64))
        )
        assert bool(found) == bool(exact), (q, k)


def test_a_turn_of_a_ring() -> None:
    """What one rank holds with what another does, in two runs each: rows by index, an interval of keys a query."""
    segment, rate, H = 256, 2, 2
    split = Sharding(300, 2, order="zigzag")
    place = Placement(split.ranges(0), (split.ranges(1),), complete=False, num_tokens=300)
    pattern = fd.masks.dilated(segment, rate, "interleaved") & fd.masks.causal()
    call = PlacedCall(pattern.text, place, 0.25, 0, H, "flex")
    rule = oracle.both(oracle.dilated(segment, rate, "interleaved"), oracle.causal())
    counts = oracle.counts(rule, range(H), H, split.positions(0), split.positions(1))
    leaves = tuple(torch.randn(1, H, split.length(rank), 16).double().requires_grad_() for rank in (0, 1, 1))

    def on_device(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.float().to("cuda") for x in tensors)
        out, lse = call.forward(q, k, v, [])
        return out.cpu().double(), lse.cpu().double()

    def dense(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return oracle.attention(*tensors, counts, 0.25)

    computed, known = ((*attend(*leaves), *gradients(attend, leaves)) for attend in (on_device, dense))
    for found, truth in zip(computed, known, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_that_lie_far_apart(axis: int) -> None:
    """By 2**31 and more: entries of a batch, heads, tokens. The values of a fused projection may be such."""
    shape = [1, 1, 200, 32]
    shape[axis] = max(2, shape[axis])
    apart, strides = -(-(1 << 31) // (shape[axis] - 1)), [*torch.empty(shape).stride()]
    strides[axis] = apart
    near = [torch.randn(shape).half().double().requires_grad_() for _ in range(3)]
    room = near[0].numel()
    memory = torch.empty((shape[axis] - 1) * apart + 3 * room, dtype=torch.float16, device="cuda")
    far = [memory.as_strided(shape, strides, each * room) for each in range(3)]
    for x, values in zip(far, near, strict=True):
        x.copy_(values.detach()).requires_grad_()

    out, known = (fd.attend(*x, fd.masks.causal(), engine=engine) for x, engine in ((far, "flex"), (near, "reference")))
    grads = torch.autograd.grad(out, far, torch.ones_like(out))
    for found, truth in zip((out, *grads), (known, *torch.autograd.grad(known.sum(), near)), strict=True):
        torch.testing.assert_close(found.cpu().double(), truth, rtol=0, atol=4e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in device_cases() if "catalogue" not in name])
def test_what_a_device_is_asked_first(name: str) -> None:
    """The correctness cases of `bench/h200.sh`, in float16 for bfloat16, which the interpreter has not."""
    for call in device_cases()[name]:
        half = {"dtype": torch.float16} if call.keywords["dtype"] == torch.bfloat16 else {}
        call("flex", "cuda", **half)


@pytest.mark.thorough
def test_a_model_is_what_it_is_on_the_cpu() -> None:
    """Logits, gradients of all parameters, padding, and the tokens that it writes."""
    ladder: dict[str, Any] = {"segment_lengths": (64, 256), "dilation_rates": (1, 2)}
    config = fd.LongNetConfig(embed_dim=32, num_heads=2, depth=2, vocab_size=50, causal=True, **ladder)
    tokens, padding = torch.randint(50, (2, 300)), torch.arange(300) >= torch.tensor([[200], [300]])
    here = fd.LongNet(config)
    there = deepcopy(here).to("cuda")
    found = []
    for model, device in ((here, "cpu"), (there, "cuda")):
        logits = model(tokens.to(device), key_padding_mask=padding.to(device))
        logits[1].square().mean().backward()
        written = model.generate(tokens[:, :100].to(device), max_new_tokens=4, temperature=0.0)
        found.append([logits[1], *(each.grad for each in model.parameters()), written.float()])
    for known, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed.cpu(), known, rtol=1e-3, atol=1e-5)


def test_every_pattern_of_the_catalogue_is_a_case() -> None:
    assert [case.name for case in CATALOGUE] == [entry.name for entry in ENTRIES]


SMALL_LONGNET = fd.masks.longnet((256, 512, 1024), (1, 2, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", [1024, 1100])
def test_gathers_and_merge_move_little_more_than_they_must(num_tokens: int, record_property) -> None:
    """Each active row of q, k and v is to be read and written once, each branch's output read, the result written."""
    H, D = 4, 64
    q, k, v = (torch.zeros(1, H, num_tokens, D, dtype=torch.float16, device="cuda") for _ in range(3))
    with counted() as moved, torch.no_grad():
        fd.attend(q, k, v, SMALL_LONGNET)
    token, head = torch.arange(num_tokens), torch.arange(H)[:, None]
    branches = ((branch.segment, branch.rate) for branch in SMALL_LONGNET.branches())
    active = {rate: int((token % segment % rate == head % rate).sum()) for segment, rate in branches}
    gathered = sum(rows for rate, rows in active.items() if rate > 1)
    least = (6 * gathered + sum(active.values()) + H * num_tokens) * D * q.itemsize
    figure = {"figure": round(sum(moved) / least, 3), "target": 1.2}
    record_property(f"flex_bytes: bytes moved over the least, {num_tokens:,} tokens", figure)
    assert 0.9 * least <= sum(moved) <= 1.2 * least


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each load and store of kernels that run meanwhile; attention's own are made and do not run."""
    moved: list[int] = []
    builder = triton("runtime.interpreter").InterpreterBuilder

    def counting(method: Callable[..., Any], mask_place: int) -> Callable[..., Any]:
        def counted_call(self: Any, pointers: Any, *rest: Any) -> Any:
            there = np.broadcast_to(rest[mask_place].data, pointers.data.shape)
            moved.append(len(np.unique(pointers.data[there])) * pointers.get_element_ty().primitive_bitwidth // 8)
            return method(self, pointers, *rest)

        return counted_call

    run = triton_heuristics.CachingAutotuner.run

    def run_others(self: Any, *arguments: Any, **options: Any) -> Any:
        return None if is_template(self) else run(self, *arguments, **options)

    # What attention did not write may be anything.
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(triton_heuristics.CachingAutotuner, "run", run_others)
        patch.setattr(builder, "create_masked_load", counting(builder.create_masked_load, 0))
        patch.setattr(builder, "create_masked_store", counting(builder.create_masked_store, 1))
        yield moved
