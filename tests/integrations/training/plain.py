"""A small language model, with a pattern or its dense mask, and the steps that plain PyTorch takes with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask

import flexdilated as fd
from flexdilated import masks

VOCABULARY, TOKENS, HEADS, DIM = 17, 40, 4, 32
STEPS = 2
# Each row holds a key: SDPA has no use for others.
PATTERN = (masks.head_groups([masks.dilated(8, 1), masks.dilated(40, 4)]) | masks.local_window(left=2, right=0)) & (
    masks.causal()
)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # each (batch, heads, tokens, head dim)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The pattern, by its mask of queries x keys."""
    bound = PATTERN.bind(num_heads=HEADS, num_queries=TOKENS, num_keys=TOKENS)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=create_mask(bound.mask_mod(), 1, HEADS, TOKENS, TOKENS, "cpu")
    )


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ffn = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, DIM) in and out."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.ffn(x)


def model_of(attention: Attention) -> nn.Sequential:
    """Two blocks in float64, with the same weights at every call."""
    torch.manual_seed(0)
    blocks = (Block(attention) for _ in range(2))
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), *blocks, nn.Linear(DIM, VOCABULARY)).double()


def sparse_model() -> nn.Sequential:
    """The model with the pattern."""
    return model_of(fd.BlockSparseAttention(PATTERN))


def batches() -> Tensor:
    """(STEPS, 4, TOKENS + 1): text for each step."""
    return torch.randint(VOCABULARY, (STEPS, 4, TOKENS + 1), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, in which a wrong gradient shows at its own size."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def plain_steps() -> dict[str, Tensor]:
    """The parameters after STEPS steps of the dense model, in a loop of plain PyTorch."""
    model = model_of(dense)
    optimizer = optimizer_of(model)
    for text in batches():
        optimizer.zero_grad()
        loss_of(model, text).backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def assert_steps(found: dict[str, Tensor]) -> None:
    """The parameters are those after the plain steps, and not those before."""
    torch.testing.assert_close(found, plain_steps())
    first = dict(model_of(dense).named_parameters())
    assert all(not torch.equal(first[name], x) for name, x in found.items())
