"""attention_received and block_mass: sums and means of dense float64 attention, for whatever is drawn; the picture."""

import sys

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.refinement import _block_mass
from tests.support import twins
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import Case, block_sides, cases, tensors, whole_cases


def weights(q, k, counts, lse=None, scale=None):
    """(B, H, N, M): multiplicity * exp(score - lse) in float64, and the lse of all these keys."""
    q, k = q.detach().double(), k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale) + counts.double().log()
    own = scores.logsumexp(-1)
    lse = own if lse is None else lse.double()
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp(), own


def by_block(weights, lse, sides, q_offset=0, k_offset=0):
    """(H, R, C): the mean over the rows of a block whose lse is above -inf, block by block and row by row."""
    (q_side, k_side), (_, H, N, M) = sides, weights.shape
    first = q_offset // q_side, k_offset // k_side
    rows, columns = (q_offset + N - 1) // q_side + 1 - first[0], (k_offset + M - 1) // k_side + 1 - first[1]
    mass = torch.zeros(H, rows, columns, dtype=torch.float64)
    for head in range(H):
        for row in range(rows):
            here = [i for i in range(N) if (q_offset + i) // q_side - first[0] == row]
            seen = [(b, i) for b in range(len(lse)) for i in here if lse[b, head, i] > -torch.inf]
            for column in range(columns):
                keys = [j for j in range(M) if (k_offset + j) // k_side - first[1] == column]
                total = sum(weights[b, head, i, keys].sum() for b, i in seen)
                mass[head, row, column] = total / max(1, len(seen))
    return mass


@st.composite
def calls(draw):
    """q and k, a pattern, how often each pair counts, and sizes: of one rule, or of one for each batch entry."""
    if draw(st.booleans()):
        case = draw(cases(max_heads=3, largest=24))
        return *draw(tensors(case))[:2], case.twin.pattern, case.counts(), case.sizes
    case = draw(packed_cases(largest=20))
    return *draw(tensors(case, batch=case.batch))[:2], case.pattern, case.counts, case.offsets


@given(
    calls(), st.sampled_from([None, "reference", "aten", "portable"]), st.sampled_from([None, 0.3, 0.0, -0.7]),
    st.booleans(), block_sides | st.tuples(block_sides, block_sides),
    st.sampled_from([1, 7, 100, _block_mass._PAIRS_AT_ONCE]),
)  # fmt: skip
def test_sums_of_dense_attention(call, engine, scale, has_sinks, block, cells):
    """By key, and by blocks down to one query at a time; what sinks take, or keys of other calls, is missing."""
    q, k, pattern, counts, sizes = call
    _, lse = weights(q, k, counts, scale=scale)
    rows = (lse > -torch.inf).double()
    if has_sinks:
        sinks = torch.linspace(-1.0, 2.0, q.shape[1], dtype=torch.float64)[:, None]
        lse = torch.logaddexp(lse, sinks)
        rows = 1 - (sinks - lse).exp()
    shares, _ = weights(q, k, counts, lse, scale)
    options = {"scale": scale, "enable_gqa": True, **sizes}
    received = fd.attention_received(q, k, lse, pattern, engine=engine, **options)
    assert (received.dtype, received.requires_grad) == (torch.float64, False)
    torch.testing.assert_close(received, shares.sum(2), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(received.sum(-1), rows.sum(-1), rtol=1e-8, atol=1e-9)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_block_mass, "_PAIRS_AT_ONCE", cells)
        mass = fd.block_mass(q, k, lse, pattern, block=block, **options)
    assert (mass.dtype, mass.requires_grad) == (torch.float64, False)
    offsets = {name: sizes[name] for name in ("q_offset", "k_offset")}
    sides = block if isinstance(block, tuple) else (block, block)
    torch.testing.assert_close(mass, by_block(shares, lse, sides, **offsets), rtol=1e-8, atol=1e-10)


@given(whole_cases(), st.data(), st.integers(1, 6), st.sampled_from(["aten", "portable", "reference"]))
def test_any_order_of_tokens_and_size_of_blocks(case, data, rate, engine):
    q, k, _ = data.draw(tensors(case))
    order, (shares, lse) = masks.Layout(case.num_keys, rate), weights(q, k, case.counts())
    ordered = order.apply(q), order.apply(k), order.apply(lse, dim=-1)
    options = {"enable_gqa": True, "layout": order, "engine": engine}
    if engine == "aten":
        options["block_size"] = data.draw(st.sampled_from([128, 8, (16, 32)]))
    received = fd.attention_received(*ordered, case.twin.pattern, **options)
    torch.testing.assert_close(received, order.apply(shares.sum(2), dim=-1), rtol=1e-9, atol=1e-12)


@settings(max_examples=9)
@given(cases(), st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_half_precision_runs_in_float32_on_cpu(engine, case, data, dtype):
    q, k, _ = data.draw(tensors(case, dtype))
    expected, lse = weights(q, k, case.counts())
    options = {"enable_gqa": True, "engine": engine, **case.sizes}
    received = fd.attention_received(q, k, lse.float(), case.twin.pattern, **options)
    assert received.dtype == torch.float32
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)


TWIN = (twins.longnet((16, 32), (1, 2)) & twins.causal()) + twins.first_tokens(1)
PATTERN, COUNTS = TWIN.pattern, Case.whole(TWIN, 4, 50).counts()


def one_call(dtype=torch.float64):
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 2, 4, 50, 8, dtype=dtype)
    _, lse = fd.attend(q, k, v, PATTERN, return_lse=True)
    return q, k, lse, weights(q, k, COUNTS)[0].sum(2)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_without_gradients_and_with_tensors_that_want_them(engine):
    q, k, lse, expected = one_call()
    with torch.no_grad():
        torch.testing.assert_close(fd.attention_received(q, k, lse, PATTERN, engine=engine), expected)
    with torch.inference_mode():
        inside = fd.attention_received(q.clone(), k.clone(), lse.clone(), PATTERN, engine=engine)
    torch.testing.assert_close(inside.clone(), expected)
    wanted = [x.clone().requires_grad_() for x in (q, k, lse)]
    received = fd.attention_received(*wanted, PATTERN, engine=engine)
    assert not received.requires_grad
    torch.testing.assert_close(received, expected)


def test_compiled_whole():
    q, k, lse, expected = one_call()
    compiled = torch.compile(lambda *x: fd.attention_received(*x, PATTERN), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, lse), expected)


def test_autocast_is_that_of_the_call():
    q, k, _, _ = one_call(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = fd.attend(q, k, k, PATTERN, return_lse=True)
        received = fd.attention_received(q, k, lse, PATTERN)
        mass = fd.block_mass(q, k, lse, PATTERN, block=16)
    assert torch.equal(mass, fd.block_mass(q.bfloat16(), k.bfloat16(), lse, PATTERN, block=16))
    expected, _ = weights(q.bfloat16(), k.bfloat16(), COUNTS, lse)
    assert received.dtype == torch.float32
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)


GREY, NOWHERE = (0.85, 0.85, 0.85, 1.0), 0.0


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    """Figures are drawn to memory, whatever the machine shows."""
    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")


def shades_of(figure):
    """The colors of values, as the bar beside the picture has them."""
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == "attention received" and not axes.lines]
    mappable = bar._colorbar.mappable
    return lambda values: torch.from_numpy(mappable.to_rgba(values.numpy()))


def slide(step_x=256, step_y=128):
    """Tiles of a 5 x 4 grid, of which three are missing, in an order of their own."""
    y, x = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    cells = torch.stack([x, y], -1).flatten(0, 1)
    kept = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:17]
    return cells[kept], cells[kept] * torch.tensor([step_x, step_y]) + torch.tensor([1000, 64])


def test_tiles_stand_at_their_coordinates():
    cells, coordinates = slide()
    received = torch.rand(2, 3, 17, dtype=torch.float64) + 0.1
    received[1, 2, 5] = 0.0
    figure = fd.plot_attention_received(received, coordinates=coordinates, batch=1, title="aten")
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == ["mean of 3 heads", "head 0", "head 1", "head 2"]
    shades = shades_of(figure)
    for axes, values in zip(maps, [received[1].mean(0), *received[1]], strict=True):
        picture = torch.from_numpy(axes.images[0].get_array().data)
        expected = torch.zeros(4, 5, 4, dtype=torch.float64)
        expected[cells[:, 1], cells[:, 0]] = shades(values.clamp(min=1e-30))
        if values.min() == 0:
            expected[cells[5, 1], cells[5, 0]] = torch.tensor(GREY, dtype=torch.float64)
        torch.testing.assert_close(picture, expected)
        assert (picture[..., 3] == NOWHERE).sum() == 3
        # Pixel (x, y) of the slide is the corner of its tile: extents lie half a tile around.
        assert axes.images[0].get_extent() == [1000 - 128, 1000 + 4.5 * 256, 64 + 3.5 * 128, 64 - 64]


def test_places_off_any_grid_are_points():
    _, coordinates = slide()
    received = torch.rand(1, 12, 17) + 0.1
    moved = coordinates + torch.rand(17, 2, generator=torch.Generator().manual_seed(2)) * 40
    twice = fd.plot_attention_received(torch.ones(1, 1, 3), coordinates=torch.tensor([[0, 0], [0, 0], [1, 1]]))
    assert any(axes.get_title() and axes.collections for axes in twice.axes), "two tokens at one place are points"
    figure = fd.plot_attention_received(received, coordinates=moved)
    (axes,) = [axes for axes in figure.axes if axes.collections and axes.get_title()]
    assert axes.get_title() == "mean of 12 heads"
    torch.testing.assert_close(torch.from_numpy(axes.collections[0].get_offsets().data), moved.double())
    colors = torch.from_numpy(axes.collections[0].get_facecolors())
    torch.testing.assert_close(colors, shades_of(figure)(received[0].double().mean(0)))
    assert axes.yaxis_inverted()


def test_a_strip_a_head_over_the_sequence():
    received = torch.rand(1, 3, 40, dtype=torch.float64) + 0.1
    figure = fd.plot_attention_received(received, k_offset=4056)
    strip, curves = figure.axes[:2]
    assert strip.images[0].get_extent()[:2] == list(curves.get_xlim()) == [4056, 4096]
    torch.testing.assert_close(torch.from_numpy(strip.images[0].get_array().data), shades_of(figure)(received[0]))
    drawn = {line.get_label(): torch.from_numpy(line.get_ydata()) for line in curves.lines}
    torch.testing.assert_close(drawn["head 1"], received[0, 1])
    torch.testing.assert_close(drawn["mean of 3 heads"], received[0].mean(0))
    assert list(curves.lines[0].get_xdata()) == [4056.5 + token for token in range(40)]
    assert curves.xaxis.get_major_formatter()(4096) == "4,096"


def test_many_tokens_and_heads_share_columns_and_a_curve():
    received = torch.rand(1, 9, 4096, dtype=torch.float64) + 0.1
    strip, curves = fd.plot_attention_received(received).axes[:2]
    assert strip.images[0].get_array().shape == (9, 1024, 4)
    (line,) = curves.lines
    torch.testing.assert_close(torch.from_numpy(line.get_ydata()), received[0].mean(0).view(1024, 4).mean(1))
    assert curves.get_xlabel() == "token, means over 4.0 neighbours"


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'needs matplotlib: pip install "flexdilated\[plot\]"'):
        fd.plot_attention_received(torch.ones(1, 1, 3))


def test_nothing_received_is_drawn_too(tmp_path):
    figure = fd.plot_attention_received(torch.zeros(1, 2, 10))
    figure.savefig(tmp_path / "nothing.svg")
    assert (tmp_path / "nothing.svg").stat().st_size > 1000
