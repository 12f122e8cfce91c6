"""Wire codecs: exact bytes, proven bounds on the error, rows that no codec can write, who may choose what."""

from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.buffers import wire_report
from flexdilated.distributed import traffic
from flexdilated.distributed.group._ranks import Ranks
from flexdilated.distributed.wire._codec import check_codec, choose_codec, codec_named, gradient_codec, peak_to_rms
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = [None, "bf16", "int8"]
WRITES = [(name, dtype) for name in NAMES for dtype in DTYPES if (name, dtype) != ("bf16", torch.float16)]
writes = pytest.mark.parametrize(("name", "dtype"), WRITES)
NAN, INF = float("nan"), float("inf")


@st.composite
def rows(draw, dtypes=DTYPES, largest_power=15):
    """Rows of every size and spread: magnitudes over many powers of two, equal ones, outliers, zeros, both signs."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from([(1,), (2,), (3, 5), (2, 3, 8), (1, 2, 4, 64), (4, 17), (0, 8)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "heavy", "outliers", "equal", "zeros", "halves"]))
    if kind == "heavy":
        x = x.sign() * 2.0 ** x.mul(3).clamp(-10, 6)
    elif kind == "outliers":
        x[..., 0] *= 100
    elif kind == "equal":
        x = torch.full(shape, 0.7, dtype=torch.float64) * x.sign()
    elif kind == "zeros":
        x[torch.rand(shape, generator=generator) < 0.7] = 0
    elif kind == "halves":  # as many as can lie between two levels
        x = torch.randint(-254, 255, shape, generator=generator).double() / 2
    largest = float(x.abs().max()) if x.numel() else 0.0
    power = draw(st.integers(-10, largest_power))
    if largest:
        x = x * (2.0**power / largest)
    return x.to(dtype)


def round_trip(x, codec):
    return codec.decode(codec.encode(x), x.shape[-1], x.dtype)


@writes
def test_bytes_shapes_and_strides(name, dtype) -> None:
    """Rows need not be contiguous; what is written has no part in a graph."""
    codec = codec_named(name)
    for shape in ((8,), (0, 8), (2, 3, 5, 24), (1, 1, 7, 1), (3, 17)):
        x = torch.randn(shape).to(dtype)
        size = {None: shape[-1] * dtype.itemsize, "bf16": 2 * shape[-1], "int8": shape[-1] + 4}[name]
        assert codec.vector_bytes(shape[-1], dtype) == size
        wire = codec.encode(x)
        assert (wire.shape, wire.dtype) == ((*shape[:-1], size), torch.uint8)
        back = codec.decode(wire, shape[-1], dtype)
        assert (back.shape, back.dtype) == (x.shape, dtype)
    column = torch.randn(5, 3).to(dtype)[:, 1:2]  # rows of one number, three apart
    assert torch.equal(codec.encode(column), codec.encode(column.clone(memory_format=torch.contiguous_format)))
    x = torch.randn(3, 8, 4).to(dtype).transpose(0, 2).requires_grad_()
    assert torch.equal(codec.encode(x), codec.encode(x.detach().contiguous()))
    assert not codec.encode(x).requires_grad


@given(rows(dtypes=DTYPES[:3], largest_power=100))
def test_bf16_is_within_one_in_256(x) -> None:
    assert torch.equal(round_trip(x, codec_named(None)), x)
    error = (round_trip(x, codec_named("bf16")).double() - x.double()).abs()
    assert bool((error <= 2.0**-8 * x.double().abs()).all())
    if x.dtype == torch.bfloat16:
        assert not error.any()


@given(rows())
def test_int8_is_within_half_a_scale(x) -> None:
    """Into float64, so that nothing is rounded on the way out; then in x's own dtype, which rounds once more."""
    codec, exact = codec_named("int8"), x.double()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    wire = codec.encode(x)
    found = codec.decode(wire, x.shape[-1], x.dtype, out=torch.empty_like(exact))
    assert bool(((found - exact).abs() <= 0.50001 * scale).all())
    rounding = torch.finfo(x.dtype).eps / 2 * found.abs()
    own = codec.decode(wire, x.shape[-1], x.dtype)
    tiniest = torch.finfo(x.dtype).smallest_normal
    assert bool(((own.double() - found).abs() <= 1.01 * rounding + tiniest).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_at_the_ends_of_the_range(dtype) -> None:
    """Tiny and huge rows keep half a scale; below float32's normal scales an error is below every scale."""
    finite = torch.finfo(dtype)
    largest = min(finite.max, 3.4e38)  # float32's largest is 3.4028e38, of which 127 scales may be one bit above
    x = torch.tensor([[largest, -largest / 2, 0], [finite.tiny, -finite.tiny / 2, 0]], dtype=torch.float64).to(dtype)
    error = (round_trip(x, codec_named("int8")).double() - x.double()).abs()
    least = torch.finfo(torch.float32).tiny
    scale = (x.double().abs().amax(-1, keepdim=True) / 127).clamp_min(least)
    assert bool((error <= 0.51 * scale + finite.eps * x.double().abs()).all())


@writes
def test_a_row_that_is_not_finite_never_looks_sound(name, dtype) -> None:
    for bad in (NAN, INF, -INF):
        x = torch.randn(3, 8).to(dtype)
        x[1, 2] = bad
        back = round_trip(x, codec_named(name))
        assert bool(back[[0, 2]].isfinite().all())
        if name == "int8":
            assert bool(back[1].isnan().all())
        else:
            assert torch.equal(back[1].isfinite(), x[1].isfinite())
            assert str(back[1, 2].item()) == str(bad)


def test_what_a_codec_cannot_reach_is_not_finite() -> None:
    assert round_trip(torch.tensor([[3.4e38, 1.0]]), codec_named("bf16")).tolist() == [[INF, 1.0]]
    assert round_trip(torch.tensor([[1e300, 1.0]], dtype=torch.float64), codec_named("int8")).isnan().all()


def test_gradients_never_go_below_bf16() -> None:
    for name, dtype in product(NAMES, DTYPES):
        found = gradient_codec(codec_named(name), dtype)
        assert found.vector_bytes(16, dtype) >= 32
        assert found.name == ("bf16" if name and dtype in (torch.float32, torch.float64) else None)
        found.check(dtype)


@given(data=st.data())
def test_auto_keeps_the_bound(data: st.DataObject) -> None:
    """And takes int8 wherever half a scale, and the rounding of half precision, is within it for every row.

    Not for rows that its scale makes longer than those of two bytes a number.
    """
    x = data.draw(rows())
    rounding = torch.finfo(x.dtype).eps / 2 if x.dtype.itemsize == 2 else 0
    half_scale = peak_to_rms(x) * 0.50001 / 127
    at_the_edge = [1.0001 * half_scale + part * rounding for part in (0, 0.5, 0.9, 1)]
    anywhere = [0.001, 2**-8, 0.0039, 0.005, 0.008, 0.01, 0.02, 0.1, 0.9]
    bound = data.draw(st.sampled_from([edge for edge in (*at_the_edge, *anywhere) if edge < 1]))
    codec = choose_codec(x, x, bound)
    check_codec("auto", bound, x.dtype)
    if x.numel():
        assume(bool((x.double().abs().amax(-1) == 0).logical_or(x.double().abs().amax(-1) > 1e-3).all()))
        assert wire_report(x, x, codec).largest_error <= bound
    assert (codec.name == "int8") == (half_scale + rounding <= bound and x.shape[-1] > 4)
    if codec.name != "int8":
        assert codec.name == ("bf16" if x.dtype.itemsize > 2 and bound >= 2**-8 else None)


TOGETHER = [
    (0.1, torch.float32, "int8", 1),
    (0.02, torch.float32, "bf16", 1),
    (0.02, torch.float16, None, 1),
    (0.0039, torch.float32, None, 0),
    (0.00391, torch.float32, "bf16", 1),
]


def choose_on_ranks() -> list[tuple[str | None, dict, dict]]:
    """Rank 1 alone has a row with an outlier; a rank holds no row at all."""
    ranks, found = Ranks.of(line()), []
    for bound, dtype, *_ in TOGETHER:
        k = torch.ones(1, 2, 3, 64, dtype=dtype)[:, :, : 0 if ranks.rank == 2 else None].clone()
        if ranks.rank == 1:
            k[0, 1, 2, 5] = 30.0
        traffic().reset()
        name = choose_codec(k, k.flip(-1), bound, ranks).name
        found.append((name, dict(traffic().sent), dict(traffic().transfers)))
    return found


def test_ranks_choose_together() -> None:
    """A peak of 7.8 on one rank: 3.1 % at most as int8."""
    wanted = [(name, {"set-up": 8} if once else {}, {"set-up": 1} if once else {}) for _, _, name, once in TOGETHER]
    assert on_ranks(3, choose_on_ranks) == [wanted] * 3


def test_rows_beyond_bfloat16_go_as_they_are() -> None:
    """Finite numbers that no narrower codec can write: "auto" keeps its bound and leaves them alone."""
    k = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    assert choose_codec(k, k * 1e200, 0.05).name is None
    assert choose_codec(k, k, 0.05).name == "int8"
    wide = torch.full((1, 1, 2, 4), 3.4e38)  # float32 has it, bfloat16 has not
    narrow = torch.eye(4)[None, None]  # int8 exceeds these bounds
    for bound in (0.0039063, 0.005):
        assert choose_codec(wide, narrow, bound).name is None
        assert choose_codec(narrow, narrow, bound).name == "bf16"
