"""Lightning, accelerate, fully_shard and torchtitan's shape of a model take the steps that plain PyTorch takes."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader

from flexdilated import masks
from tests.project.test_docs import examples
from tests.support.ranks import on_ranks

from .plain import (
    DIM,
    HEADS,
    PATTERN,
    TOKENS,
    VOCABULARY,
    assert_steps,
    batches,
    dense,
    loss_of,
    optimizer_of,
    sparse_model,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "frameworks.md"


def loader() -> DataLoader:
    return DataLoader(list(batches().flatten(0, 1)), batch_size=4)


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
    trainer.fit(module, loader())
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
    optimizer = optimizer_of(model)
    for text in batches():
        optimizer.zero_grad()
        loss_of(model, text.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.step()
    parts: dict[str, Any] = dict(model.named_parameters())
    assert all(x.to_local().numel() < x.numel() for name, x in parts.items() if x.shape[0] > 1)
    return {name: x.full_tensor().detach() for name, x in parts.items()}


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


class Flex(nn.Module):
    """Its flex backend, not compiled."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flex_attention(q, k, v, block_mask=attention_masks, **options)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)


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
    found, wanted = titan(page.PatternAttention()), titan(Dense())
    for model, rule in ((found, PATTERN), (wanted, None)):
        optimizer = optimizer_of(model)
        for text in batches():
            optimizer.zero_grad()
            loss_of(lambda tokens, model=model, rule=rule: model(tokens, attention_masks=rule), text).backward()
            optimizer.step()
    torch.testing.assert_close(dict(found.named_parameters()), dict(wanted.named_parameters()))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_a_block_mask_for_its_own_flex_backend() -> None:
    text = batches()[0, :, :-1]
    block_mask = masks.block_mask(PATTERN, TOKENS, num_heads=HEADS)
    torch.testing.assert_close(titan(Flex())(text, block_mask), titan(Dense())(text))
