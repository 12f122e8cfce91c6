"""Lightning, accelerate, fully_shard and torchtitan's shape of a model take the steps that plain PyTorch takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import flexdilated as fd
from flexdilated import masks
from tests.integrations.passes import counts
from tests.project.test_docs import examples
from tests.support.ranks import on_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "frameworks.md"
VOCABULARY, TOKENS, HEADS, DIM = 17, 40, 4, 32
STEPS = 2
# Each row holds a key: SDPA has no use for others.
PATTERN = (masks.head_groups([masks.dilated(8, 1), masks.dilated(40, 4)]) | masks.local_window(left=2, right=0)) & (
    masks.causal()
)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The pattern, by its mask of queries x keys."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=counts(PATTERN, TOKENS, num_heads=HEADS) > 0)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ffn = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, DIM) in and out."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.ffn(x)


def model_of(attention: Callable[..., Tensor]) -> nn.Sequential:
    """Two blocks in float64, with the same weights at every call."""
    torch.manual_seed(0)
    blocks = (Block(attention) for _ in range(2))
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), *blocks, nn.Linear(DIM, VOCABULARY)).double()


def sparse_model() -> nn.Sequential:
    return model_of(fd.BlockSparseAttention(PATTERN))


def batches() -> Tensor:
    return torch.randint(VOCABULARY, (STEPS, 4, TOKENS + 1), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, in which a wrong gradient shows at its own size."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def trained(model: nn.Module, share: Callable[[Tensor], Tensor] = lambda text: text, **options: Any) -> dict[str, Any]:
    """The parameters after a step with each batch, or with a share of each."""
    optimizer = optimizer_of(model)
    for text in batches():
        optimizer.zero_grad()
        loss_of(partial(model, **options), share(text)).backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def assert_steps(found: dict[str, Tensor]) -> None:
    """The parameters are those after plain PyTorch's steps of the dense model, and not those before."""
    torch.testing.assert_close(found, trained(model_of(dense)))
    first = dict(model_of(dense).named_parameters())
    assert all(not torch.equal(first[name], x) for name, x in found.items())


def test_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = sparse_model()

        def training_step(self, text: Tensor, index: int) -> Tensor:
            return loss_of(self.model, text)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    trainer.fit(module, DataLoader(list(batches().flatten(0, 1)), batch_size=4))
    assert trainer.global_step == 2
    assert_steps({name: x.detach() for name, x in module.model.named_parameters()})


def test_accelerate() -> None:
    """Gradients are accumulated over the two halves of each batch, as `accumulate` has it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = sparse_model()
    halves = DataLoader(list(batches().flatten(0, 1)), batch_size=2)
    prepared: Any = accelerator.prepare(model, optimizer_of(model), halves)
    model, optimizer, halves = prepared
    for text in halves:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, text))
            optimizer.step()
            optimizer.zero_grad()
    found = accelerator.unwrap_model(model).named_parameters()
    assert_steps({name: x.detach() for name, x in found})


def sharded_steps() -> dict[str, Tensor]:
    """This rank's part of the steps: half of each batch, parameters spread over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), sparse_model()
    for block in list(model)[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = trained(model, lambda text: text.chunk(dist.get_world_size())[dist.get_rank()])
    assert all(x.to_local().numel() < x.numel() for name, x in parts.items() if x.shape[0] > 1)
    return {name: x.full_tensor() for name, x in parts.items()}


@pytest.mark.slow
def test_fully_shard() -> None:
    for found in on_ranks(2, sharded_steps, timeout=200):
        assert_steps(found)


class Titan(nn.Module):
    """The shape of torchtitan's decoders: masks go through the layers to an inner attention, heads behind tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(2))
        self.inner = inner

    def forward(self, tokens: Tensor, attention_masks: Any = None) -> Tensor:
        x = self.tokens(tokens)
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (2 * HEADS, -1)).split([HEADS, HEADS // 2, HEADS // 2], dim=2)
            x = x + self.inner(q, k, v, attention_masks=attention_masks, scale=0.3, enable_gqa=True).flatten(2)
        return self.head(x)


class Dense(nn.Module):
    """Its flex or SDPA backend, in the form that runs and differentiates on CPU."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float, enable_gqa: bool
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        return dense(q * (scale * (DIM // HEADS) ** 0.5), k, v).transpose(1, 2)


def titan(inner: nn.Module) -> Titan:
    torch.manual_seed(0)
    return Titan(inner).double()


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    """What the example of torchtitan in docs/integrations/frameworks.md defines; its test runs the others, too."""
    first, *_, titans = examples(PAGE)
    namespace: dict[str, Any] = {}
    for example in (first, titans):
        exec(example.code, namespace)
    return SimpleNamespace(**namespace)


def test_a_pattern_goes_through_torchtitans_layers(page: SimpleNamespace) -> None:
    found = trained(titan(page.PatternAttention()), attention_masks=PATTERN)
    torch.testing.assert_close(found, trained(titan(Dense())))
