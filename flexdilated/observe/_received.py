"""Attention that each key receives, computed as the gradient of v for a cotangent of ones; and a picture of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d

from .._attend import autocast, checked_call
from .._engine_choice import choose_engine
from .._validate import Place, Scale, check_lse, check_tensors, expand_batch
from ..engines import Call, Features, aten_backward, refuse_transforms, run, sum_dtype
from ..masks import Layout, Mixture, Pattern
from ..masks.core import advises, device_kind, require_below, require_expression, require_int

if TYPE_CHECKING:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

_MOST_COLUMNS = 1024  # of a strip; with more tokens, neighbours share a column
_MOST_HEADS = 8  # up to which heads are also drawn separately, next to their mean
_MOST_CELLS = 1 << 22  # of a grid; larger grids are drawn as points
_NOTHING = (0.85, 0.85, 0.85, 1.0)  # color of tokens that received nothing
_LABEL = "attention received"


@advises()
def attention_received(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "#B G M D"],
    lse: Float[Tensor, "B H N"],
    pattern: Pattern | Mixture,
    *,
    scale: Scale = None,
    enable_gqa: bool = False,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    layout: Layout | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
) -> Float[Tensor, "B H M"]:
    """Return the attention that each key receives: sum over queries of multiplicity * exp(score - lse), per query head.

    The multiplicity of a pair is the number of the pattern's branches that allow it.

    lse: as `attend(q, k, v, pattern, return_lse=True)` returns it.
    scale, enable_gqa, bindings, q_offset, k_offset, head_offset, num_heads_global, layout: as in that call; offsets are
        numbers, not tensors.

    A query distributes 1 over its keys, and nothing if its lse is -inf. So a head's entries sum to the number of its
    queries with keys, less the share of sinks and of zero keys (of padding="zeros"), which the lse includes. If the lse
    covers more keys than k, the result is the share of the keys in k.

    Uses about as much memory as a backward pass of the engine; "reference" makes an N x M matrix. The result is
    float32, or float64 for float64 inputs, and has no gradient. Half-precision inputs are computed in float32 on CPU;
    on accelerators engine="flex" rounds the result for them to half precision.

    engine: as in `attend`, except "flash", which has no gradient of v alone, and "flex" on CPU, which has no backward.
    block_size: as in `attend`.

    Raises ValueError or TypeError, before any work, for inputs that do not fit together.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> _, lse = fd.attend(q, k, v, masks.causal(), return_lse=True)
    >>> fd.attention_received(q, k, lse, masks.causal()).shape
    torch.Size([1, 4, 256])
    """
    require_expression(pattern)
    q, k, _ = expand_batch(*autocast(q, k, k))
    check_tensors(q, k, k, enable_gqa=enable_gqa)
    check_lse(lse, q)
    place = Place(q_offset, k_offset, head_offset, num_heads_global, layout, block_size)
    q, call, tensors, factor = checked_call(q, k, pattern, place, scale, bindings)
    if engine == "flex" and not device_kind(q.device).flex_trains:
        raise ValueError("attention_received needs a backward, and flex has none on CPU; engine='aten' serves it")
    if engine == "flash":
        raise ValueError(
            "attention_received needs a gradient of v alone, which flash does not have; engine='flex' serves it"
        )
    chosen = choose_engine(engine, q, k, k, pattern, Features(factor))
    refuse_transforms("attention_received", (q, k, lse))
    q, k, lse = q.detach(), k.detach(), lse.detach().to(sum_dtype(q))
    if 0 in q.shape or 0 in k.shape:
        return lse.new_zeros(q.shape[0], q.shape[1], k.shape[2])
    if chosen == "aten":
        return _received_by_aten(q, k, lse, tensors, call, factor)
    return _received_by_autograd(q, k, lse, tensors, call, chosen, factor)


def _received_by_aten(q: Tensor, k: Tensor, lse: Tensor, bindings: list[Tensor], call: Call, scale: float) -> Tensor:
    """Return attention received, (B, H, M), from the backward op of `attend` with the given lse."""
    wide = sum_dtype(q)
    # Gradients of keys wider than queries are as wide; the op reads the keys in the queries' dtype.
    q, k = (q.to(wide) if device_kind(q.device).on_host else q), k.to(wide)
    out = torch.zeros_like(q)  # the gradient of v depends on neither out nor v, so k is passed as v
    found = [
        _received_of_members(
            aten_backward(cotangent, None, q, k, k, out, lse, bindings, *call.arguments, scale)[2], members
        )
        for members, cotangent in _cotangents(q, k.shape[1])
    ]
    return torch.cat(found, 2).flatten(1, 2)


def _received_by_autograd(
    q: Tensor, k: Tensor, lse: Tensor, bindings: list[Tensor], call: Call, engine: str, scale: float
) -> Tensor:
    """Return attention received, (B, H, M), from the gradient of v through the engine."""
    wide = sum_dtype(q)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, lse = (x.clone() if x.is_inference() else x for x in (q, k, lse))
        if engine == "reference":
            q, k = q.double(), k.double()  # else the engine would round its float64 result to their dtype
        elif device_kind(q.device).on_host:
            q, k = q.to(wide), k.to(wide)
        v = torch.zeros_like(k).requires_grad_()
        out, own = run(engine, q, k, v, bindings, call, Features(scale))
        assert own is not None
        none = (own == -torch.inf) | (lse == -torch.inf)
        # `own` is over the keys in k only and without sinks, so cotangents are multiplied by exp(own - lse).
        weight = (own.detach() - lse.masked_fill(none, 0.0)).masked_fill(none, -torch.inf).exp()[..., None]
        found = [
            _received_of_members(
                torch.autograd.grad(out, v, (cotangent * weight).to(out.dtype), retain_graph=True)[0], members
            )
            for members, cotangent in _cotangents(q, k.shape[1])
        ]
    return torch.cat(found, 2).flatten(1, 2).to(wide)


def _cotangents(q: Tensor, num_kv_heads: int) -> Iterator[tuple[range, Tensor]]:
    """Yield (range of indices within a group of query heads, cotangent of the output in the shape of q).

    A group is the query heads of one key/value head, over which the gradient of v is summed. For each index in the
    range the cotangent has ones in a separate column of D, so that the results of the group's heads stay apart.
    """
    dim, group = q.shape[3], q.shape[1] // num_kv_heads
    member, column = torch.arange(q.shape[1], device=q.device) % group, torch.arange(dim, device=q.device)
    for first in range(0, group, dim):
        ones = (member[:, None] - first == column).to(q.dtype)
        yield range(first, min(first + dim, group)), torch.empty_like(q).copy_(ones[:, None, :].expand_as(q))


def _received_of_members(grad_v: Float[Tensor, "B G M D"], members: range) -> Float[Tensor, "B G C M"]:
    return grad_v[..., : len(members)].transpose(2, 3)


@advises()
def plot_attention_received(
    received: Float[Tensor, "B H M"],
    *,
    coordinates: Shaped[Tensor, "M 2"] | None = None,
    batch: int = 0,
    k_offset: int = 0,
    title: str | None = None,
) -> Figure:
    """Return a matplotlib figure of the result of `attention_received` for batch entry `batch`; save it by `savefig`.

    Without coordinates it draws one color strip per head along the sequence, and below these a curve of the mean over
    heads, and one per head for at most 8 heads. Above 1,024 tokens, neighbours are averaged. With coordinates it draws
    a map of the mean over heads, and one per head for at most 8 heads; x grows to the right, y downwards, and positions
    without a token stay white. Colors and curves have logarithmic scales; tokens that received nothing are grey in
    strips and maps, and gaps in curves.

    coordinates: (x, y) of each token, such as the tiles of a slide; None for a sequence.
    k_offset: position of the first key, as in the call of `attend`; 0 with coordinates.
    title: None for no title.

    Raises ValueError or TypeError for tensors of other shapes, with NaN or infinity, or negative attention, and
    ImportError without matplotlib.

    >>> figure = fd.plot_attention_received(torch.rand(1, 4, 256))
    >>> figure.savefig('received.png')
    """
    if not isinstance(received, Tensor):
        raise TypeError(f"received must be a tensor from attention_received; got {type(received).__name__}")
    if received.dim() != 3 or 0 in received.shape:
        raise ValueError(f"received must have the 3 dims (batch, heads, keys); got {tuple(received.shape)}")
    require_below("batch", batch, len(received), "batch entries")
    heads = received[batch].detach().to("cpu", torch.float64)
    if not heads.isfinite().all() or heads.min() < 0:
        raise ValueError(
            "received must hold finite numbers of at least 0, as attention_received gives them; got NaN, infinity or a "
            "negative number"
        )
    require_int("k_offset", k_offset, minimum=0)
    if coordinates is not None:
        if k_offset:
            raise ValueError(
                f"k_offset must be 0 with coordinates, as it is for keys along a sequence; got {k_offset=}"
            )
        if not isinstance(coordinates, Tensor):
            raise TypeError(f"coordinates must be a tensor; got {type(coordinates).__name__}")
        if coordinates.shape != (heads.shape[1], 2):
            got = tuple(coordinates.shape)
            raise ValueError(f"coordinates must be the (x, y) of each of {heads.shape[1]} keys; got {got}")
        if not coordinates.isfinite().all():
            raise ValueError("coordinates must be finite; got NaN or infinity")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plot_attention_received needs matplotlib: pip install "flexdilated[plot]"') from error
    figure = Figure(layout="constrained", dpi=140)
    if coordinates is None:
        _draw_sequence(figure, heads, k_offset)
    else:
        _draw_maps(figure, heads, coordinates.detach().to("cpu", torch.float64))
    if title is not None:
        figure.suptitle(title)
    return figure


def _draw_sequence(figure: Figure, heads: Tensor, first: int) -> None:
    tokens, columns = heads.shape[1], min(heads.shape[1], _MOST_COLUMNS)
    drawn, height = adaptive_avg_pool1d(heads[None], columns)[0], 0.6 + 0.22 * min(len(heads), 24)
    figure.set_size_inches(11, height + 4.4)
    strip, curves = figure.subplots(2, 1, sharex=True, height_ratios=(height, 2.2))
    shades = _color_scale(drawn)
    extent = (first, first + tokens, len(heads) - 0.5, -0.5)
    strip.imshow(_colors(drawn, shades).numpy(), aspect="auto", interpolation="nearest", extent=extent)
    strip.set_ylabel("head")
    strip.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(shades, ax=strip, label=_LABEL)
    middle = (first + (torch.arange(columns) + 0.5) * (tokens / columns)).numpy()
    if len(heads) <= _MOST_HEADS:
        for index, head in enumerate(drawn):
            curves.plot(middle, head.numpy(), linewidth=0.7, alpha=0.7, label=f"head {index}")
    curves.plot(middle, drawn.mean(0).numpy(), color="black", linewidth=1.4, label=f"mean of {len(heads)} heads")
    label = "token" if columns == tokens else f"token, means over {tokens / columns:.1f} neighbours"
    curves.set(xlabel=label, ylabel=_LABEL, xlim=(first, first + tokens))
    curves.xaxis.set_major_formatter("{x:,.0f}")
    if drawn.max() > 0:
        # On a linear scale, global tokens would flatten all other curves; a few tiny values would on a logarithmic one.
        curves.set_yscale("log", nonpositive="mask")
        most = float(drawn.max())
        least, most = _ends(max(float(drawn[drawn > 0].min()), most / 1e6), most)
        curves.set_ylim(least / 1.2, most * 1.2)
    curves.legend(loc="upper right", ncols=3, fontsize="small", frameon=False)


def _draw_maps(figure: Figure, heads: Tensor, places: Tensor) -> None:
    panels = {f"mean of {len(heads)} heads" if len(heads) > 1 else "head 0": heads.mean(0)}
    if 1 < len(heads) <= _MOST_HEADS:
        panels |= {f"head {index}": head for index, head in enumerate(heads)}
    rows, columns = -(-len(panels) // 3), min(len(panels), 3)
    figure.set_size_inches(4.2 * columns + 1.2, 4.0 * rows + 0.4)
    shades, grid = _color_scale(torch.stack(list(panels.values()))), _grid(places)
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, values) in zip(all_axes, panels.items(), strict=False):
        axes.set(title=name, xlabel="x", ylabel="y", aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.10g}")
        colors = _colors(values, shades)
        if grid is None:
            axes.scatter(*places.T.numpy(), c=colors.numpy(), s=6)
            axes.invert_yaxis()
            continue
        cells, step = grid
        size, least = cells.max(0).values + 1, places.min(0).values
        picture = torch.zeros(int(size[1]), int(size[0]), 4, dtype=colors.dtype)  # transparent
        picture[cells[:, 1], cells[:, 0]] = colors
        (left, top), (right, bottom) = (least - step / 2).tolist(), (least + step * (size - 0.5)).tolist()
        axes.imshow(picture.numpy(), interpolation="nearest", extent=(left, right, bottom, top))
    figure.colorbar(shades, ax=list(all_axes), label=_LABEL, shrink=0.9)


def _grid(places: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (column and row of each token, grid steps along x and y), shapes (M, 2) and (2,).

    It is None if the places do not form a regular grid, if two tokens have one place, or if the grid has more than
    _MOST_CELLS cells.

    places: (x, y) of each token, shape (M, 2).
    """
    gaps = [along.unique().diff() for along in places.T]
    step = torch.stack([each.min() if len(each) else places.new_ones(()) for each in gaps])
    exact = (places - places.min(0).values) / step
    cells = exact.round()
    is_shared = len(cells.unique(dim=0)) < len(cells)
    if is_shared or (exact - cells).abs().max() > 1e-3 or (cells.max(0).values + 1).prod() > _MOST_CELLS:
        return None
    return cells.long(), step


def _color_scale(values: Tensor) -> ScalarMappable:
    """Return a logarithmic color scale from the 1st to the 99th percentile of the values above 0."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    # Tensor.quantile takes no more than 2**24 values.
    some = values[values > 0].clamp(1e-30, 1e30).sort().values
    ends = some[[round(share * (len(some) - 1)) for share in (0.01, 0.99)]].tolist() if len(some) else (1.0, 1.0)
    return ScalarMappable(LogNorm(*_ends(*ends), clip=True))


def _ends(least: float, most: float) -> tuple[float, float]:
    """Return the ends of a logarithmic scale: (least, most), or (least / 2, most * 2) if they are within 1 %."""
    return (least, most) if most >= 1.01 * least else (least / 2, most * 2)


def _colors(values: Tensor, shades: ScalarMappable) -> Tensor:
    """Return the RGBA color of each value on the scale `shades`; grey for 0."""
    colors = torch.from_numpy(shades.to_rgba(values.clamp(min=torch.finfo(values.dtype).tiny).numpy()))
    colors[values == 0] = torch.tensor(_NOTHING, dtype=colors.dtype)
    return colors
