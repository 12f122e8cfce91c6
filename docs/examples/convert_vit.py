"""An encoder of patches learns to fill in hidden ones of a picture, is converted to neighbourhoods, and learns on.

python docs/examples/convert_vit.py
python docs/examples/convert_vit.py --image photo.jpg --grid 32 --radius 4 --steps 400
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import get_data_path
from matplotlib.image import imread
from torch import Tensor, nn

import flexdilated as fd
from flexdilated import masks


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A dense encoder of patches goes over to neighbourhoods")
    parser.add_argument("--image", default=Path(get_data_path(), "sample_data", "grace_hopper.jpg"))
    parser.add_argument("--grid", type=int, default=12, help="patches along each side of a crop")
    parser.add_argument("--patch", type=int, default=8, help="pixels along each side of a patch")
    parser.add_argument("--radius", type=int, default=2, help="a patch sees (2 * radius + 1)^2 patches")
    parser.add_argument("--steps", type=int, default=120, help="half of them dense, half converted")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dim", type=int, default=64, help="features of a patch")
    return parser.parse_args(arguments)


class PatchEncoder(nn.Module):
    """(batch, patches, pixels) in and out; hidden patches (batch, patches) are replaced by a learned one."""

    def __init__(self, patches: int, pixels: int, dim: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed, self.head = nn.Linear(pixels, dim), nn.Linear(dim, pixels)
        self.places = nn.Parameter(0.02 * torch.randn(1 + patches, dim))
        self.cls, self.gap = (nn.Parameter(0.02 * torch.randn(dim)) for _ in range(2))

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        x = torch.where(hidden[..., None], self.gap, self.embed(patches))
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.places
        return self.head(self.encoder(x)[:, 1:])


def draw(image: Tensor, count: int, given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Crops of the picture as patches (count, patches, pixels), and which of these are hidden, half of them."""
    side = given.grid * given.patch
    tops, lefts = (torch.randint(size - side + 1, (count,)).tolist() for size in image.shape[:2])
    crops = torch.stack([image[y : y + side, x : x + side] for y, x in zip(tops, lefts, strict=True)])
    patches = crops.unflatten(2, (-1, given.patch)).unflatten(1, (-1, given.patch)).transpose(2, 3)
    return patches.flatten(1, 2).flatten(2), torch.rand(count, given.grid**2) < 0.5


def error(model: nn.Module, patches: Tensor, hidden: Tensor) -> Tensor:
    """Mean square over the hidden patches, in units of the picture's variance."""
    return (model(patches, hidden) - patches)[hidden].square().mean()


def train(model: nn.Module, image: Tensor, given: argparse.Namespace) -> None:
    """Half of the steps, on crops drawn anew for each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    for _ in range(given.steps // 2):
        error(model, *draw(image, given.batch, given)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """The error on crops drawn once: at first, dense, converted at once, and after training converted."""
    given = options(arguments)
    torch.manual_seed(0)
    image = torch.tensor(imread(given.image), dtype=torch.float32)
    image = (image - image.mean()) / image.std()
    examples = draw(image, given.batch, given)
    model, errors = PatchEncoder(given.grid**2, examples[0].shape[-1], given.dim), {}

    @torch.no_grad()
    def note(when: str) -> None:
        errors[when] = float(error(model, *examples))
        print(f"{errors[when]:.3f}  {when}")

    note("at first")
    train(model, image, given)
    note("dense")
    near = masks.neighborhood((given.grid, given.grid), given.radius).after(1) | masks.global_tokens(1)
    print(fd.convert(model, near))
    note("converted at once")
    train(model, image, given)
    note("after training converted")
    return errors


if __name__ == "__main__":
    main()
