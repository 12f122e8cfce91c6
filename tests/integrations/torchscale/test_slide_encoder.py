"""SlideEncoder: Prov-GigaPath's function, positions without a table, checkpoints; over ranks it is that of one."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.integrations.torchscale import (
    LongNetEncoder,
    LongNetEncoderConfig,
    SlideEncoder,
    SlideEncoderConfig,
    slide_segments,
)
from tests.integrations.torchscale import plain
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line, summed

BRANCHES = ((8, 20, 50), (1, 3, 4))
LAYERS = LongNetEncoderConfig(24, 2, 3, *BRANCHES, padding="zeros")
ALIGNED = replace(LAYERS, segment_lengths=(8, 21, 52))  # multiples of their rates: no rows are shifted
SMALL = SlideEncoderConfig(LAYERS, tile_dim=6, grid_size=30)


def slide(config: SlideEncoderConfig, L: int, *, dtype=torch.float64, batch: int = 1, seed: int = 0):
    """Tiles at different places of the grid, each corner somewhere in its tile."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.stack([torch.randperm(config.grid_size**2, generator=generator)[:L] for _ in range(batch)])
    corners = torch.stack((cells // config.grid_size, cells % config.grid_size), -1) * config.tile_size
    within = torch.randint(config.tile_size, corners.shape, generator=generator)
    return torch.randn(batch, L, config.tile_dim, generator=generator, dtype=dtype), (corners + within).float()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("L", [1, 19, 96])
def test_small_slides_are_published(L, pooling) -> None:
    """Each of the states' embeddings; 96 tiles and a token are several segments that their rates do not divide."""
    torch.manual_seed(L)
    model = SlideEncoder(replace(SMALL, pooling=pooling)).double()
    tiles, corners = slide(SMALL, L, batch=2)
    how = {"num_heads": 3, "branches": BRANCHES, "grid": 30, "pooling": pooling}
    *states, last = plain.slide_encoder(model.state_dict(), tiles, corners, **how)
    # Positions are float32, as published.
    assert_close(model(tiles, corners), last, rtol=1e-6, atol=1e-6)
    assert_close(model(tiles, corners, all_layers=True), tuple(states), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_slide_without_tiles_is_one_of_padding(pooling) -> None:
    model, (tiles, corners) = SlideEncoder(replace(SMALL, pooling=pooling)).double(), slide(SMALL, 5, batch=2)
    padding = model(tiles, corners, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    assert_close(model(tiles[:, :0], corners[:, :0]), padding)


@pytest.mark.slow
def test_full_width_is_published() -> None:
    """768 channels and 16 heads in one of the twelve layers, random weights: to 1e-5 of the plain one, in float32."""
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in SlideEncoder().parameters()) == 86_330_880
    torch.manual_seed(0)
    config = SlideEncoderConfig(replace(SlideEncoderConfig().encoder, depth=1), pooling="mean")
    weights = SlideEncoder(config).state_dict()
    model, exact = (SlideEncoder.from_checkpoint(weights, config, padding=each).eval() for each in ("zeros", None))
    how = {"num_heads": 16, "branches": (slide_segments(), (1, 2, 4, 8, 16)), "grid": 1000, "pooling": "mean"}
    tiles, corners = slide(config, 1100, dtype=torch.float32)  # in two segments of the first branch
    with torch.no_grad():
        truth = plain.slide_encoder(weights, tiles, corners, **how)[-1]
        assert (model(tiles, corners) - truth).norm() < 1e-5 * truth.norm()
        assert (exact(tiles, corners) - truth).norm() > 1e-3 * truth.norm()


def test_segments() -> None:
    assert slide_segments() == (1024, 5792, 32768, 185363, 1048576)
    assert SlideEncoderConfig().encoder.segment_lengths == slide_segments()
    assert slide_segments(131072) == (1024, 4096, 16384, 65536, 262144)
    assert slide_segments(262144, 512, 2) == (1024, 262144)


def test_checkpoints() -> None:
    """With or without "model" around it; as published unless told otherwise."""
    torch.manual_seed(0)
    new = SlideEncoder(replace(SMALL, encoder=replace(LAYERS, padding=None)))
    weights = new.state_dict()
    tiles, corners = slide(SMALL, 96, dtype=torch.float32)
    loaded = SlideEncoder.from_checkpoint({"model": weights, "epoch": 3}, new.config)
    assert loaded.config.encoder.padding == "zeros"
    assert (loaded(tiles, corners) - new(tiles, corners)).norm() > 1e-3
    assert torch.equal(
        SlideEncoder.from_checkpoint(weights, new.config, padding=None)(tiles, corners), new(tiles, corners)
    )
    detached = SlideEncoder.from_checkpoint(weights, new.config, merge_grad="detached")
    assert_close(detached(tiles, corners), loaded(tiles, corners), rtol=1e-5, atol=1e-5)
    misfit = {**weights, "mask_token": torch.zeros(1), "norm.weight": torch.zeros(7)}
    del misfit["cls_token"]
    with pytest.raises(ValueError, match=r"1 missing: cls_token; 1 foreign: mask_token; 1 misshapen: norm.weight"):
        SlideEncoder.from_checkpoint(misfit, SMALL)


def test_places() -> None:
    """Only the tile that a corner lies in counts, and its order in the batch does not."""
    torch.manual_seed(0)
    model = SlideEncoder(SMALL).double().eval()
    tiles, corners = slide(SMALL, 20)
    cut = (corners // 256) * 256
    assert_close(model(tiles, cut), model(tiles, corners), **TIGHT)
    assert (model(tiles, corners.flip(-1)) - model(tiles, corners)).norm() > 1e-4
    assert_close(model(tiles, cut.long()), model(tiles, cut), **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_it_compiles(masked: bool) -> None:
    """In one graph; a mask with padding=None, as with padding="zeros" the read of the lengths would break the graph.

    The op goes through AOT in tests of attend.
    """
    torch.manual_seed(0)
    config = replace(LAYERS, depth=1, segment_lengths=(21, 50), dilation_rates=(3, 4), merge_grad="detached")
    if masked:
        config = replace(config, padding=None, merge_grad="exact")
    model = SlideEncoder(replace(SMALL, encoder=config, pooling="mean")).double()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tiles, corners, mask = batch_of(60, 31) if masked else (*slide(SMALL, 60), None)
    assert_close(compiled(tiles, corners, key_padding_mask=mask), model(tiles, corners, key_padding_mask=mask), **TIGHT)
    for outside in (-1, 256 * SMALL.grid_size):
        with pytest.raises(IndexError):
            compiled(tiles, torch.full_like(corners, outside), key_padding_mask=mask)


def batch_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tiles, corners, mask) of slides of these lengths, padded with NaN at coordinates outside the grid."""
    tiles, corners = slide(SMALL, max(lengths), batch=len(lengths))
    mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return tiles.masked_fill(mask[..., None], torch.nan), corners.masked_fill(mask[..., None], -1e6), mask


@pytest.mark.parametrize(
    ("pooling", "padding", "merge_grad"),
    [("cls", None, "exact"), ("mean", "zeros", "exact"), ("mean", None, "detached"), ("cls", "zeros", "detached")],
)
def test_padded_slides_are_those_alone(pooling, padding, merge_grad) -> None:
    """Embeddings of all layers, and gradients, equal those of each slide alone, also with zero keys."""
    torch.manual_seed(0)
    layers = replace(ALIGNED, padding=padding, merge_grad=merge_grad)
    model = SlideEncoder(replace(SMALL, encoder=layers, pooling=pooling)).double()
    lengths = (60, 31, 1)
    tiles, corners, mask = batch_of(*lengths)
    out = model(tiles, corners, key_padding_mask=mask)
    alone = torch.cat([model(tiles[i : i + 1, :n], corners[i : i + 1, :n]) for i, n in enumerate(lengths)])
    assert_close(out, alone, **TIGHT)
    gradients = [torch.autograd.grad(each.sin().sum(), list(model.parameters())) for each in (out, alone)]
    assert_close(*gradients, **TIGHT)
    floats = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
    states = model(tiles, corners, key_padding_mask=floats, all_layers=True)
    for index, n in enumerate(lengths):
        one = slice(index, index + 1)
        for found, wanted in zip(states, model(tiles[one, :n], corners[one, :n], all_layers=True), strict=True):
            assert_close(found[one], wanted, **TIGHT)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_show_what_they_attend_by(masked: bool, pooling: str) -> None:
    """Attention of the projected q, k and v by the layer's pattern gives the output of the layer.

    With padding=None also where tiles in the middle are hidden: no token attends to them, and the mean excludes them.
    """
    torch.manual_seed(0)
    layers = replace(LAYERS, padding=None) if masked else ALIGNED
    model = SlideEncoder(replace(SMALL, encoder=layers, pooling=pooling)).double().eval()
    tiles, corners = slide(SMALL, 40)
    hidden = torch.rand(1, 40, generator=torch.Generator().manual_seed(2)) < (0.4 if masked else 0.0)
    x = model.embed(*(x.masked_fill(hidden[..., None], 0) for x in (tiles, corners)))
    rule = layers.pattern & masks.visible_keys(~F.pad(hidden[0], (1, 0))) if masked else layers.pattern
    for layer in model.encoder.layers:
        assert layer.pattern == layer.self_attn.pattern == layers.pattern
        out = fd.attend(*layer.project(x), rule)
        x = x + layer.self_attn.out_proj(layer.self_attn.inner_attn_ln(out.transpose(1, 2).flatten(2)))
        x = x + layer.ffn(layer.final_layer_norm(x))
    assert model.encoder.layer_norm is not None
    x = model.encoder.layer_norm(x)
    pooled = x[:, 0] if pooling == "cls" else x[:, 1:][~hidden].mean(0, keepdim=True)
    padding = {"key_padding_mask": hidden} if masked else {}
    assert_close(model(tiles, corners, **padding), model.norm(pooled), **TIGHT)
    if masked:
        assert model(tiles, corners, key_padding_mask=torch.ones_like(hidden)).isfinite().all()


RANKED = LongNetEncoderConfig(16, 2, 4, (8, 24, 60), (1, 2, 3))  # lengths that are multiples of their rates
RANKED_SMALL = SlideEncoderConfig(RANKED, tile_dim=6, grid_size=30)
LENGTHS = (37, 20)  # of slides, which are filled up to 38 tiles
KINDS = [
    ("ring", None, "exact", "mean", True),
    ("auto", "zeros", "exact", "mean", True),
    ("exchange", "zeros", "detached", "cls", True),
    ("heads", "zeros", "exact", "cls", False),
]


def encoder(config: SlideEncoderConfig, **options) -> SlideEncoder:
    torch.manual_seed(0)
    return SlideEncoder(config, **options).double()


def slides(padded: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tiles, corners = slide(RANKED_SMALL, 38, batch=2)
    mask = torch.arange(38) >= torch.tensor(LENGTHS)[:, None]
    return tiles, corners, {"key_padding_mask": mask} if padded else {}


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.sin().sum(), list(model.parameters())))


def encode_slides() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for schedule, padding, merge_grad, pooling, padded in KINDS:
        config = replace(RANKED_SMALL, encoder=replace(RANKED, padding=padding, merge_grad=merge_grad), pooling=pooling)
        many, one = encoder(config, mesh=line(), schedule=schedule), encoder(config)
        tiles, corners, mask = slides(padded)
        mine = slice(rank * 38 // size, (rank + 1) * 38 // size)

        def about(text: str, kind: tuple = (schedule, padding, merge_grad, pooling, padded)) -> str:
            return f"{kind}: {text}"

        out, truth = many(tiles[:, mine], corners[:, mine], **mask), one(tiles, corners, **mask)
        assert_close(out, truth, **TIGHT, msg=about)
        for found, wanted in zip(gradients(many, out), gradients(one, truth), strict=True):
            assert_close(summed(found) / size, wanted, **TIGHT, msg=about)  # each rank has the whole loss
        states = many(tiles[:, mine], corners[:, mine], **mask, all_layers=True)
        for found, wanted in zip(states, one(tiles, corners, **mask, all_layers=True), strict=True):
            assert_close(found, wanted, **TIGHT, msg=about)


def encode_tokens() -> None:
    """Compare this rank's features with one device, with a sharding for the module or for a single call."""
    torch.manual_seed(0)
    sharding, other = Sharding(41, 2, "zigzag"), Sharding(30, 2, shard_lengths=(30, 0))
    many, one = LongNetEncoder(RANKED, mesh=line(), sharding=sharding).double(), LongNetEncoder(RANKED).double()
    one.load_state_dict(many.state_dict())
    x = torch.randn(2, 41, 16, dtype=torch.float64)
    mask = torch.arange(41) >= torch.tensor([[41], [17]])
    for tokens, by, call in ((41, sharding, {"key_padding_mask": mask}), (30, other, {})):
        held = by.positions(dist.get_rank())
        found = many(x[:, held], **call, sharding=by if by is other else None)
        assert_close(found, one(x[:, :tokens], **call)[:, held], **TIGHT)


def live() -> str:
    """Encoders over ranks from a checkpoint, and from the state_dict of one on a single device."""
    tiles, corners, _ = slides(False)
    weights = encoder(RANKED_SMALL).state_dict()
    many = SlideEncoder.from_checkpoint(weights, RANKED_SMALL, mesh=line(), schedule="heads").double()
    one = SlideEncoder.from_checkpoint(weights, RANKED_SMALL).double()
    half = slice(dist.get_rank() * 19, (dist.get_rank() + 1) * 19)
    assert_close(many(tiles[:, half], corners[:, half]), one(tiles, corners), **TIGHT)
    return repr(many)


def encode() -> str:
    encode_slides()
    encode_tokens()
    return live()


def test_encoders_over_ranks_are_those_of_one() -> None:
    """Embeddings of all layers; each slide is divided between two ranks, and the last rank has padding."""
    assert "mesh=2 ranks of axis 'sp', schedule='heads'" in on_ranks(2, encode)[1]
