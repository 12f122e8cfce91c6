"""Encoders over ranks: embeddings on every rank, and summed gradients, equal those of one rank."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

from flexdilated.distributed import Sharding
from flexdilated.integrations.torchscale import LongNetEncoder, LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig
from tests.integrations.torchscale.test_slide_encoder import slide
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks

LAYERS = LongNetEncoderConfig(16, 2, 4, (8, 24, 60), (1, 2, 3))  # lengths that are multiples of their rates
SMALL = SlideEncoderConfig(LAYERS, tile_dim=6, grid_size=30)
LENGTHS = (37, 20)  # of slides, which are filled up to 38 tiles
KINDS = [
    ("ring", None, "exact", "mean", True),
    ("auto", "zeros", "exact", "mean", True),
    ("exchange", "zeros", "detached", "cls", True),
    ("heads", "zeros", "exact", "cls", False),
]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))


def encoder(config: SlideEncoderConfig, **options) -> SlideEncoder:
    torch.manual_seed(0)
    return SlideEncoder(config, **options).double()


def slides(padded: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tiles, corners = slide(SMALL, 38, batch=2)
    mask = torch.arange(38) >= torch.tensor(LENGTHS)[:, None]
    return tiles, corners, {"key_padding_mask": mask} if padded else {}


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.sin().sum(), list(model.parameters())))


def summed(x: Tensor) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def encode_slides() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for schedule, padding, merge_grad, pooling, padded in KINDS:
        config = replace(SMALL, encoder=replace(LAYERS, padding=padding, merge_grad=merge_grad), pooling=pooling)
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
    many, one = LongNetEncoder(LAYERS, mesh=line(), sharding=sharding).double(), LongNetEncoder(LAYERS).double()
    one.load_state_dict(many.state_dict())
    x = torch.randn(2, 41, 16, dtype=torch.float64)
    mask = torch.arange(41) >= torch.tensor([[41], [17]])
    held = sharding.positions(dist.get_rank())
    assert_close(many(x[:, held], key_padding_mask=mask), one(x, key_padding_mask=mask)[:, held], **TIGHT)
    held = other.positions(dist.get_rank())
    assert_close(many(x[:, held], sharding=other), one(x[:, :30])[:, held], **TIGHT)


def live() -> str:
    """Encoders over ranks from a checkpoint, and from the state_dict of one on a single device."""
    tiles, corners, _ = slides(False)
    weights = encoder(SMALL).state_dict()
    many = SlideEncoder.from_checkpoint(weights, SMALL, mesh=line(), schedule="heads").double()
    one = SlideEncoder.from_checkpoint(weights, SMALL).double()
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
