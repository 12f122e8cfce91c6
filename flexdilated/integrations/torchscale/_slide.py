"""Prov-GigaPath's slide encoder: from features and coordinates of a slide's tiles to one embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from ...masks import every
from ...masks.core import require_choice, require_finite, require_int
from ...nn import without_padding
from ._config import LongNetEncoderConfig, load
from ._encoder import LongNetEncoder, real_tokens, require_batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...distributed import Sharding

# B slides, L tiles (of this rank, with a mesh), S tiles of the slide, C dim of a tile's features, E embed dim

POOLINGS = ("cls", "mean")


def slide_segments(max_slide_size: int = 262144, tile_size: int = 256, branches: int = 5) -> tuple[int, ...]:
    """Return Prov-GigaPath's segment lengths, in tiles: `branches` numbers in equal steps of log2, each rounded down.

    They go from 1024 to the number of tiles of the largest slide, rounded down to a power of 2.

    max_slide_size, tile_size: widths of the largest slide, a square, and of a tile, in pixels.

    Raises ValueError for slides of fewer than 1024 tiles, and for fewer than 2 branches.

    >>> from flexdilated.integrations.torchscale import slide_segments
    >>> slide_segments()
    (1024, 5792, 32768, 185363, 1048576)
    """
    side = require_int("max_slide_size", max_slide_size, minimum=1) // require_int("tile_size", tile_size, minimum=1)
    last, steps = (side**2).bit_length() - 1, require_int("branches", branches, minimum=2) - 1
    if last < 10:
        raise ValueError(f"the largest slide must have at least 1024 tiles; got {side} x {side}")
    return tuple(int(2 ** (10 + (last - 10) * step / steps)) for step in range(branches))


def _published_config() -> LongNetEncoderConfig:
    branches = {"segment_lengths": slide_segments(), "dilation_rates": (1, 2, 4, 8, 16)}
    return LongNetEncoderConfig(embed_dim=768, depth=12, num_heads=16, **branches)


@dataclass(frozen=True)
class SlideEncoderConfig:
    """Configuration of a `SlideEncoder`; by default the published sizes, with exact attention (encoder.padding None).

    encoder: configuration of its layers; its embed_dim is a multiple of 4.
    tile_dim: features per tile.
    grid_size: number of tiles along each axis of the grid of positions.
    tile_size: width of a tile in pixels.
    pooling: "cls", the output of the class token, or "mean" over the tiles.
    norm_eps: epsilon of the layer norm after pooling.

    Raises ValueError or TypeError for a size below 1, an unknown pooling, and an embed_dim that is no multiple of 4.

    >>> from flexdilated.integrations.torchscale import SlideEncoderConfig
    >>> SlideEncoderConfig().encoder.segment_lengths
    (1024, 5792, 32768, 185363, 1048576)
    """

    encoder: LongNetEncoderConfig = field(default_factory=_published_config)
    tile_dim: int = 1536
    grid_size: int = 1000
    tile_size: int = 256
    pooling: str = "cls"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("tile_dim", "grid_size", "tile_size"):
            require_int(name, getattr(self, name), minimum=1)
        require_choice("pooling", self.pooling, POOLINGS)
        if require_finite("norm_eps", self.norm_eps) <= 0:
            raise ValueError(f"norm_eps must be above 0; got {self.norm_eps}")
        if self.encoder.embed_dim % 4:
            raise ValueError(f"2-D positions need an embed_dim that is a multiple of 4; got {self.encoder.embed_dim}")


class SlideEncoder(nn.Module):
    """One embedding (E,) per slide, from features and coordinates of its tiles; parameters are named as published.

    The input sequence is a class token, then the projected tile features plus 2-D sin-cos position embeddings,
    which are computed in each call, without a stored table of grid_size² rows. config None: the published sizes.

    mesh: the ranks that share every slide; None for one device. Every rank then passes a contiguous shard of the tiles,
        of equal length on all ranks, and gets the embedding of the whole slide; pad slides whose number of tiles is not
        a multiple of the number of ranks.
    schedule: as in `BlockSparseAttention`.

    Gradients are of the sum of all ranks' losses: if all ranks compute the same loss, divide it by the number of
    ranks, and sum the gradients of parameters over the ranks.

    Source: prov-gigapath/prov-gigapath, gigapath/slide_encoder.py and pos_embed.py.

    >>> from flexdilated.integrations.torchscale import LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig
    >>> sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4}
    >>> layers = LongNetEncoderConfig(**sizes, segment_lengths=(16, 64), dilation_rates=(1, 4))
    >>> model = SlideEncoder(SlideEncoderConfig(layers, tile_dim=32))
    >>> coordinates = 256 * torch.cartesian_prod(torch.arange(10), torch.arange(9))[None]  # in pixels
    >>> model(torch.randn(1, 90, 32), coordinates).shape
    torch.Size([1, 64])
    """

    def __init__(
        self,
        config: SlideEncoderConfig | None = None,
        *,
        mesh: DeviceMesh | None = None,
        schedule: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, SlideEncoderConfig | None):
            raise TypeError(
                f"config must be a SlideEncoderConfig or None; got {type(config).__name__}: to load weights write "
                "SlideEncoder.from_checkpoint(torch.load(path))"
            )
        self.config = config = SlideEncoderConfig() if config is None else config
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        E = config.encoder.embed_dim
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.tile_dim, E, **how)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, E, **how))
        self.encoder = LongNetEncoder(config.encoder, mesh=mesh, schedule=schedule, **how)
        self.norm = nn.LayerNorm(E, eps=config.norm_eps, **how)
        self.reset_parameters()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Mapping[str, Any],
        config: SlideEncoderConfig | None = None,
        *,
        mesh: DeviceMesh | None = None,
        schedule: str = "auto",
        **changes: Any,
    ) -> Self:
        """Make an encoder with weights from a checkpoint of Prov-GigaPath, which was trained with padding="zeros".

        checkpoint: result of `torch.load`, {"model": state_dict}, or the state_dict.
        config: None for the published sizes; padding="zeros" and `changes` replace fields of its encoder's config.
        mesh, schedule: as in the class.
        changes: fields of the encoder's config, such as padding=None.

        Raises TypeError for a checkpoint that is no mapping, and ValueError that names the keys that are missing,
        unknown or of another shape, up to 12 of each kind.
        """
        if not isinstance(checkpoint, Mapping):
            raise TypeError(
                "checkpoint must be a mapping, as torch.load(path, weights_only=True) returns it; got "
                f"{type(checkpoint).__name__}"
            )
        config = SlideEncoderConfig() if config is None else config
        layers = replace(config.encoder, **{"padding": "zeros", **changes})
        model = cls(replace(config, encoder=layers), mesh=mesh, schedule=schedule)
        inner = checkpoint.get("model")
        load(model, inner if isinstance(inner, Mapping) else checkpoint)
        return model

    def reset_parameters(self) -> None:
        """Initialize as published: linear weights Xavier-uniform, biases 0, class token of standard deviation 0.02.

        Layer norms are left unchanged.
        """
        nn.init.normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    @overload
    def forward(
        self,
        tiles: Tensor,
        coordinates: Tensor,
        *,
        all_layers: Literal[False] = False,
        key_padding_mask: Tensor | None = None,
    ) -> Float[Tensor, "B E"]: ...

    @overload
    def forward(
        self, tiles: Tensor, coordinates: Tensor, *, all_layers: Literal[True], key_padding_mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "B E"], ...]: ...

    def forward(
        self,
        tiles: Float[Tensor, "B L C"],
        coordinates: Shaped[Tensor, "B L 2"],
        *,
        all_layers: bool = False,
        key_padding_mask: Shaped[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B E"] | tuple[Float[Tensor, "B E"], ...]:
        """Return embeddings (B, E) of the slides.

        tiles: features of each tile.
        coordinates: coordinates in the slide of one corner of each tile, in pixels; the same corner for all tiles.
        all_layers: True returns a tuple of depth + 1 embeddings instead, pooled from the encoder's input and from each
            layer's output, without the encoder's last norm.
        key_padding_mask: booleans (B, S) for the whole slides, True for padding, or floats, -inf for padding and 0 for
            tiles. Padding is neither attended to nor pooled, and its features and coordinates are not read: with
            padding at the end, a slide gets the same embedding as without padding. With padding="zeros" in the
            configuration, padding must be at the end.

        Raises TypeError or ValueError for inputs that do not fit, also for tiles outside the grid of positions (the
        published model wraps some of them to the next row). In a compiled graph such tiles cause the device's own
        index error. Masks raise as in `LongNetEncoder`.
        """
        self._check(tiles, coordinates)
        sharding, length = self._sharding(tiles), tiles.shape[1]
        num_tiles = length if sharding is None else sharding.num_tokens - 1
        mine, counts = None, torch.full((len(tiles), 1), num_tiles, device=tiles.device)
        options: dict[str, Any] = {"sharding": sharding}
        if key_padding_mask is not None:
            without_padding(every(), key_padding_mask, (len(tiles), num_tiles))  # only checks the mask
            real = real_tokens(key_padding_mask)
            mine, counts = real.narrow(1, self._rank * length, length), real.sum(1, keepdim=True)
            tiles, coordinates = (torch.where(mine[..., None], x, 0) for x in (tiles, coordinates))
            options["key_padding_mask"] = pad(key_padding_mask, (1, 0))  # the class token is no padding
        x = self.embed(tiles, coordinates)
        if all_layers:
            states = self.encoder(x, all_layers=True, **options)
            return tuple(self._pool(state, mine, counts) for state in states)
        return self._pool(self.encoder(x, **options), mine, counts)

    def embed(self, tiles: Float[Tensor, "B L C"], coordinates: Shaped[Tensor, "B L 2"]) -> Float[Tensor, "B N E"]:
        """Return the input of the encoder: the class token, then the projected tile features plus position embeddings.

        tiles, coordinates: as in `forward`; N is L + 1. With a mesh they are this rank's tiles, and so is the result,
            with the class token on rank 0 only.

        Raises as `forward` does for inputs that do not fit and for tiles outside the grid.
        """
        self._check(tiles, coordinates)
        x = self.patch_embed["proj"](tiles)
        x = x + self._position_embeddings(coordinates).to(x.dtype)
        x = torch.cat((self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
        return x if self._rank == 0 else x[:, 1:]  # cut off, so that the class token has a gradient on every rank

    def _check(self, tiles: Tensor, coordinates: Tensor) -> None:
        require_batch("tiles", tiles, "slides, tiles", self.config.tile_dim)
        require_batch("coordinates", coordinates, "slides, tiles", 2)
        if coordinates.shape[:2] != tiles.shape[:2]:
            came = f"got {tuple(coordinates.shape)} for tiles of shape {tuple(tiles.shape)}"
            raise ValueError(f"coordinates must be two for each tile, of shape {(*tiles.shape[:2], 2)}; {came}")

    @property
    def _rank(self) -> int:
        over = self.encoder.over_ranks
        return 0 if over is None else over.ranks.rank

    def _sharding(self, tiles: Tensor) -> Sharding | None:
        """Return the assignment of class token and tiles to the ranks, the token on rank 0; None without a mesh."""
        if self.encoder.over_ranks is None:
            return None
        each = self.encoder.over_ranks.sharding_of(tiles.shape[1])
        first, *rest = each.lengths
        return replace(each, num_tokens=each.num_tokens + 1, shard_lengths=(first + 1, *rest))

    def _position_embeddings(self, coordinates: Tensor) -> Float[Tensor, "B L E"]:
        """Return position embeddings: the second coordinate's in the first half of the channels, then the first's.

        Raises ValueError for tiles outside the grid, but not in a compiled graph or for meta tensors.
        """
        grid, quarter = self.config.grid_size, self.config.encoder.embed_dim // 4
        tiles = torch.floor(coordinates / self.config.tile_size).long()
        if not torch.compiler.is_compiling() and tiles.numel() and not tiles.is_meta:
            least, most = tiles.aminmax()
            if least < 0 or most >= grid:
                raise ValueError(
                    f"coordinates must be pixels from 0 to below {grid * self.config.tile_size}, on a grid of {grid} x "
                    f"{grid} tiles of {self.config.tile_size} pixels; got tiles from {int(least)} to {int(most)}: "
                    "subtract the slide's origin, or take a larger grid_size"
                )
        first, second = tiles.unbind(-1)
        # In float64, as published, with one row per possible coordinate.
        rates = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)
        angles = torch.arange(grid, dtype=torch.float64, device="cpu")[:, None] * rates
        table = torch.cat((angles.sin(), angles.cos()), -1).float().to(coordinates.device)
        # Not table[second]: an index below 0 would count from the table's end.
        return torch.cat((embedding(second, table), embedding(first, table)), -1)

    def _pool(
        self, x: Float[Tensor, "B N E"], mine: Bool[Tensor, "B L"] | None, counts: Int64[Tensor, "B 1"]
    ) -> Float[Tensor, "B E"]:
        """Return the embeddings of the whole slides, on every rank.

        x: features of this rank's tokens, which on rank 0 begin with the class token.
        mine: True for this rank's tiles that are not padding; None if there is no padding.
        counts: number of tiles of each whole slide, without padding.
        """
        if self.config.pooling == "mean":
            x = x if self._rank else x[:, 1:]
            x = x if mine is None else torch.where(mine[..., None], x, 0)
            # The mean over all tokens of this rank is within the dtype's range; without tokens it would be NaN.
            mean = x.mean(1) if x.shape[1] else x.sum(1)
            pooled = mean * (x.shape[1] / counts.clamp(min=1)).to(x.dtype)
        else:
            pooled = x[:, 0]
        if self.encoder.over_ranks is not None:
            from ...distributed import unshard

            parts = unshard(pooled[:, None], self.encoder.over_ranks.mesh, dim=1)
            pooled = parts.sum(1) if self.config.pooling == "mean" else parts[:, 0]
        return self.norm(pooled)
