"""Lightning and fully_shard take the steps that plain PyTorch takes; torchtitan's layers take a pattern."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import flexdilated as fd
from bench._dense import counts
from flexdilated import masks
from tests.project.test_docs import examples
from tests.support.longnet_oracle import TINY
from tests.support.ranks import on_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "frameworks.md"
VOCABULARY, TOKENS, HEADS, DIM = TINY.vocab_size or 0, 40, 4, 32
STEPS = 2
# Each row holds a key: SDPA has no use for others.
PATTERN = (masks.head_groups([masks.dilated(8, 1), masks.dilated(40, 4)]) | masks.local_window(left=2, right=0)) & (
    masks.causal()
)


def sparse_model() -> fd.LongNet:
    """In float64, with the same weights at every call."""
    torch.manual_seed(0)
    return fd.LongNet(replace(TINY, segment_lengths=None, dilation_rates=None, pattern=PATTERN), dtype=torch.float64)


def batches() -> Tensor:
    return torch.randint(VOCABULARY, (STEPS, 4, TOKENS + 1), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, in which a wrong gradient shows at its own size."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def trained(model: nn.Module, share: Callable[[Tensor], Tensor] = lambda text: text) -> dict[str, Any]:
    """The parameters after a step with each batch, or with a share of each."""
    optimizer = optimizer_of(model)
    for text in batches():
        optimizer.zero_grad()
        loss_of(model, share(text)).backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def assert_steps(found: dict[str, Tensor]) -> None:
    """The parameters are those after plain PyTorch's steps, and not those before."""
    torch.testing.assert_close(found, trained(sparse_model()))
    first = dict(sparse_model().named_parameters())
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


def sharded_steps() -> dict[str, Tensor]:
    """This rank's part of the steps: half of each batch, parameters spread over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), sparse_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = trained(model, lambda text: text.chunk(dist.get_world_size())[dist.get_rank()])
    assert all(x.to_local().numel() < x.numel() for name, x in parts.items() if x.shape[0] > 1)
    return {name: x.full_tensor() for name, x in parts.items()}


@pytest.mark.slow
def test_fully_shard() -> None:
    for found in on_ranks(2, sharded_steps, timeout=200):
        assert_steps(found)


def test_a_pattern_goes_through_torchtitans_layers() -> None:
    """What the example of the page defines: heads behind tokens, as an inner attention of torchtitan gets them."""
    first, *_, titans = examples(PAGE)
    namespace: dict[str, Any] = {}
    for example in (first, titans):
        exec(example.code, namespace)
    q, k, v = torch.randn(4, TOKENS, 2 * HEADS, DIM // HEADS).double().split([HEADS, HEADS // 2, HEADS // 2], dim=2)
    found = namespace["PatternAttention"]()(q, k, v, attention_masks=PATTERN, scale=0.3, enable_gqa=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    allowed = counts(PATTERN, TOKENS, num_heads=HEADS) > 0
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(found, want)
