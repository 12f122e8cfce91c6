"""A small Wan learns to denoise videos of a moving blob, is converted to a pattern of tiles or of radii, and learns on.

python docs/examples/sparse_video.py
python docs/examples/sparse_video.py --pattern radial --grid 8 12 12 --steps 400 --picture radial.png
"""

import argparse
import copy
from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from diffusers import WanTransformer3DModel  # pyright: ignore[reportMissingImports]
from matplotlib.colors import ListedColormap
from torch import Tensor, nn

import flexdilated as fd
from flexdilated import masks

PATCH = (1, 2, 2)  # frames, rows and columns of a latent that make a token
TILE, NUM_TILES = (1, 2, 2), (3, 3, 3)  # a tile's tokens, and the tiles that its queries see, along each axis
TEXT = 16


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A video transformer goes over from dense attention to a sparse pattern"
    )
    parser.add_argument("--pattern", choices=("sliding_tile", "radial"), default="sliding_tile")
    parser.add_argument("--grid", type=int, nargs=3, default=(6, 8, 8), help="frames, rows and columns of tokens")
    parser.add_argument("--steps", type=int, default=160, help="half of them dense, half dense or converted")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--head-dim", type=int, default=24, help="features of each of two heads")
    parser.add_argument("--picture", default="sparse_video.png", help="which tokens a query reads")
    return parser.parse_args(arguments)


def patterns(grid: Sequence[int]) -> dict[str, masks.Pattern]:
    tiles = masks.recipes.sliding_tile(grid, tile=TILE, num_tiles=NUM_TILES)
    return {"sliding_tile": tiles, "radial": masks.recipes.radial(grid)}


def transformer(head_dim: int) -> nn.Module:
    heads = {"num_attention_heads": 2, "attention_head_dim": head_dim}
    text = {"text_dim": TEXT, "freq_dim": 32, "rope_max_seq_len": 64}
    return WanTransformer3DModel(PATCH, **heads, **text, in_channels=1, out_channels=1, ffn_dim=128, num_layers=2)


def videos(count: int, grid: Sequence[int]) -> Tensor:
    """Latents (count, 1, frames, rows, columns) of a blob that moves on a straight line, around a torus."""
    frames, rows, columns = (tokens * size for tokens, size in zip(grid, PATCH, strict=True))
    sides = torch.tensor([rows, columns])
    start, speed = torch.rand(count, 1, 2) * sides, torch.randn(count, 1, 2)
    centre = (start + speed * torch.arange(frames)[:, None]) % sides  # (count, frames, 2)
    offsets = [
        (torch.arange(side) - centre[..., axis, None] + side / 2) % side - side / 2
        for axis, side in enumerate((rows, columns))
    ]
    distance = offsets[0].square()[..., :, None] + offsets[1].square()[..., None, :]
    return 3 * torch.exp(-distance / 8)[:, None] - 0.5


def draw(count: int, grid: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Videos, noise of their shape, and the share of noise in each, (count,)."""
    clean = videos(count, grid)
    return clean, torch.randn_like(clean), torch.rand(count)


def error(model: nn.Module, clean: Tensor, noise: Tensor, share: Tensor) -> Tensor:
    """Mean square of the velocity, noise minus video, that is predicted from their mixture."""
    mixture = torch.lerp(clean, noise, share[:, None, None, None, None])
    text = torch.zeros(len(clean), 1, TEXT)
    return (model(mixture, 1000 * share, text).sample - (noise - clean)).square().mean()


def train(model: nn.Module, given: argparse.Namespace, *, seed: int) -> None:
    """Half of the steps, on videos drawn anew for each; two models trained from one seed see the same ones."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    for _ in range(given.steps // 2):
        error(model, *draw(given.batch, given.grid)).backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens_read(pattern: masks.Pattern, query: int, grid: Sequence[int]) -> Tensor:
    """Whether a query reads each token, (frames, rows, columns)."""
    num_tokens = grid[0] * grid[1] * grid[2]
    allowed = pattern.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens).mask_mod()
    zero, keys = torch.tensor(0), torch.arange(num_tokens)
    return allowed(zero, zero, torch.tensor(query), keys).expand(num_tokens).view(*grid)


def picture(grid: Sequence[int], path: str) -> None:
    """Draw which tokens of each frame a query in the middle reads, a row of frames for each pattern."""
    frames, rows, columns = grid
    frame, row, column = frames // 2, rows // 2, columns // 2
    query = (frame * rows + row) * columns + column
    figure, axes = plt.subplots(2, frames, figsize=(1.2 * frames, 3.2), squeeze=False, layout="constrained")
    colors = ListedColormap(["#e8ecf1", "#3b6ea8", "#e07b1f"])
    for line, (name, pattern) in zip(axes, patterns(grid).items(), strict=True):
        read = tokens_read(pattern, query, grid).int()
        share = float(read.float().mean())
        read[frame, row, column] = 2
        for number, (cells, image) in enumerate(zip(line, read.numpy(), strict=True)):
            cells.imshow(image, cmap=colors, vmin=0, vmax=2)
            cells.set(title=f"frame {number}", xticks=[], yticks=[])
            for each in range(1, max(rows, columns)):
                cells.axhline(each - 0.5, color="white", linewidth=0.6)
                cells.axvline(each - 0.5, color="white", linewidth=0.6)
        line[0].set_ylabel(f"{name}\n{share:.0%} of the tokens")
    figure.suptitle("Tokens that a query (orange) reads (blue)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Return the error on videos drawn once: at first, dense, and after as many steps again, dense and converted."""
    given = options(arguments)
    picture(given.grid, given.picture)
    torch.manual_seed(0)
    examples, model, errors = draw(4 * given.batch, given.grid), transformer(given.head_dim), {}

    @torch.no_grad()
    def note(when: str, model: nn.Module) -> None:
        errors[when] = float(error(model, *examples))
        print(f"{errors[when]:.3f}  {when}")

    note("at first", model)
    train(model, given, seed=1)
    note("dense", model)
    dense = copy.deepcopy(model)
    print(fd.convert(model, patterns(given.grid)[given.pattern]))
    note("converted at once", model)
    train(model, given, seed=2)
    train(dense, given, seed=2)
    note("after training converted", model)
    note("after training dense", dense)
    return errors


if __name__ == "__main__":
    main()
