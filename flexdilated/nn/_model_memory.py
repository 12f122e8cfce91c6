"""Memory of a LongNet of a given size, in training and inference, from a run of the model's code on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import masks
from ..masks import Mixture, Pattern
from ..memory import META, AttentionMemory, AttentionSize, KernelBytes, LiveBytes, nbytes
from ._longnet import LongNet
from ._longnet_config import LongNetConfig

# B batch, N tokens, E embed dim


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a LongNet without vocabulary; its pattern and the number of tokens are not among them.

    The hidden width of its feed-forwards is 4 * embed_dim.

    dtype: of weights and inputs.
    batch: number of sequences per forward pass.
    num_kv_heads: number of key-value heads; None means num_heads.
    """

    embed_dim: int
    depth: int
    num_heads: int
    dtype: torch.dtype
    batch: int = 1
    num_kv_heads: int | None = None

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a LongNet in bytes; a peak is the largest sum of all tensors alive at one time.

    weights: the parameters; their gradients have equal size.
    optimizer: AdamW's two moments, in the weights' dtype.
    inference_peak: a forward without gradients, including weights and input.
    step_peak: a forward and a backward, including input, weights, their gradients and the gradient of the features.
    training_peak: step_peak plus optimizer.
    """

    weights: int
    inference_peak: int
    step_peak: int

    @property
    def optimizer(self) -> int:
        return 2 * self.weights

    @property
    def training_peak(self) -> int:
        return self.step_peak + self.optimizer


def longnet_around(pattern: Pattern | Mixture, size: ModelSize, *, checkpoint: bool) -> LongNet:
    """Make a LongNet of this size for embedded inputs, in which all blocks attend by `pattern`, in natural token order.

    checkpoint: as in `LongNetConfig`.
    """
    config = LongNetConfig(
        vocab_size=None,
        embed_dim=size.embed_dim,
        depth=size.depth,
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        pattern=pattern,
        causal=False,
        layout="natural",
        checkpoint=checkpoint,
    )
    return LongNet(config, dtype=size.dtype)


def training_step(model: LongNet, x: Tensor) -> Tensor:
    """Run a forward, and the backward of the features' mean square; returns the features."""
    features = model(x)
    features.backward(features.detach() * (2 / features.numel()))
    return features


def model_memory(size: ModelSize, num_tokens: int, attention: AttentionMemory, *, checkpoint: bool) -> ModelMemory:
    """Return the memory of a LongNet of this size for sequences of num_tokens tokens, found by a run on meta tensors.

    attention: memory of the attention in one block, whose sizes are `attention_size(size, num_tokens)`.
    checkpoint: as in `LongNetConfig`.
    """
    # Bytes inside the attention operators, without their inputs; the incoming gradient has the size of the output.
    forward = KernelBytes(attention.forward_peak - attention.inputs, attention.kept - attention.inputs_and_results)
    backward = KernelBytes(attention.backward_peak - attention.kept - attention.outputs)
    aten, aten_backward = torch.ops.flexdilated.aten.default, torch.ops.flexdilated.aten_backward.default
    alone = {aten: KernelBytes(attention.inference_peak - attention.inputs)}
    with META:
        model = longnet_around(masks.every(), size, checkpoint=checkpoint)
        weights = list(model.parameters())
        x = torch.empty(size.batch, num_tokens, size.embed_dim, dtype=size.dtype)
        with torch.no_grad(), LiveBytes(x, *weights, hidden=alone) as inference:
            model(x)
        with LiveBytes(x, *weights, hidden={aten: forward, aten_backward: backward}) as training:
            training_step(model, x)
    return ModelMemory(nbytes(*weights), inference.peak, training.peak)


def attention_size(size: ModelSize, num_tokens: int) -> AttentionSize:
    """Return the sizes of the attention in one block of the model.

    q, k and v are laid out in memory as (B, N, heads, D), as projections return them.
    """
    return AttentionSize(
        num_tokens, size.num_heads, size.head_dim, size.dtype, size.batch, size.num_kv_heads, tokens_outermost=True
    )
