"""Engine "flex" on the CPU around a dense stand-in for FlexAttention's kernels, with an lse and gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench._dense import one_by_one
from flexdilated import _attend, masks
from flexdilated._engine_choice import choose_engine
from flexdilated.engines.flex import _flex_op
from flexdilated.engines.flex._selected_op import selected_parts
from flexdilated.masks.core import _devices

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


def dense_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    return_aux: Any = None,
    score_mod: Callable[..., Tensor] | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> Any:
    """What an accelerator's kernel computes: listed blocks, the mask_mod on partial ones, and maybe an lse."""
    B, H, N, M = *q.shape[:3], k.shape[2]
    k, v = (x.repeat_interleave(H // k.shape[1], dim=1) if enable_gqa else x for x in (k, v))
    entries, heads, rows, columns = torch.arange(B), torch.arange(H), torch.arange(N), torch.arange(M)
    by_rule = block_mask.mask_mod(entries[:, None, None, None], heads[:, None, None], rows[:, None], columns)
    row_block, column_block = rows // block_mask.BLOCK_SIZE[0], columns // block_mask.BLOCK_SIZE[1]
    blocks = int(column_block.max()) + 1
    partial, full = (
        _listed(counts, indices, blocks)[:, :, row_block][..., column_block]
        for counts, indices in (
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        )
    )
    read = (partial | full).expand(B, H, -1, -1)  # a kernel reads the slots of listed blocks
    rows_read, columns_read = read.any(3)[..., None], read.any(2)[..., None]
    q, (k, v) = q.masked_fill(~rows_read, 0.0), (x.masked_fill(~columns_read, 0.0) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if score_mod is not None:
        scores = one_by_one(score_mod)(scores, entries, heads, rows, columns)
    scores = scores.masked_fill(~(full | (partial & by_rule)), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = (weights @ v).masked_fill(~rows_read, 0.0)
    return out if return_aux is None else (out, SimpleNamespace(lse=lse))


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """(B or 1, H or 1, rows, columns): which blocks the lists name."""
    holds = torch.arange(indices.shape[-1]) < counts[..., None]
    named = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool)
    return named.scatter(3, torch.where(holds, indices, blocks).long(), True)[..., :blocks]


@contextmanager
def flex_on_cpu(kernel: Callable[..., Any] = dense_flex, *, trains: bool = True) -> Iterator[None]:
    """Calls that name engine "flex" are served whatever they need, around the kernel.

    trains: plans are those of an accelerator, whose kernels give an lse; False: those of the CPU.
    """

    def choose(engine: str | None, *given: Any, **how: Any) -> str:
        return "flex" if engine == "flex" else choose_engine(engine, *given, **how)

    cpu = replace(_devices._KINDS["cpu"], flex_trains=trains)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_devices._KINDS, "cpu", cpu)
        patch.setattr(_attend, "choose_engine", choose)
        patch.setattr(_flex_op, "run_flex", partial(_flex_op.run_flex, kernel=kernel))
        # Tables have kernels of their own: their description is made, as on an accelerator, and not used.
        patch.setattr(_flex_op, "selected_parts", lambda pattern: selected_parts(pattern) and None)
        if not trains:
            patch.setattr(_flex_op, "_attend_in_parts", _flex_op._attend)  # which detaches q, k and v
        masks.cache().clear()
        yield
    masks.cache().clear()
