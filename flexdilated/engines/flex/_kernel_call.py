"""The one call of FlexAttention: block tables and a mask as a BlockMask, and the options of its Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from ...masks.core import MaskMod
from .._score_mod import ScoreMod
from ._program import Tables

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Kernel = Callable[..., Any]


def call_kernel(
    kernel: Kernel,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    tables: Tables,
    mask_mod: MaskMod,
    *,
    sides: tuple[int, int],
    scale: float,
    score_mod: ScoreMod | None,
    needs_lse: bool = True,
    warps: int = 0,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"] | None]:
    """(out, natural lse if it is needed) of `kernel`, which is called as flex_attention is.

    tables: on accelerators their numbers have to lie one after the other, which nothing checks. sides: of the blocks.
    warps: of the forward kernel in half precision up to head dim 64; 0 for torch's own choice.
    """
    numbers: dict[str, Any] = {"seq_lengths": (q.shape[2], k.shape[2]), "BLOCK_SIZE": sides, **tables}
    mask = BlockMask(**numbers, mask_mod=mask_mod)
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if score_mod is not None:
        options["score_mod"] = score_mod
    if q.device.type != "cpu":
        options["kernel_options"] = _kernel_options(q, k, sides, warps)
    if not needs_lse:
        return kernel(q, k, v, **options), None
    out, aux = kernel(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def are_whole_blocks(lengths: tuple[int, int], sides: tuple[int, int]) -> bool:
    """Whether so many queries and keys fill blocks of these sides: kernels then need not check where tokens end."""
    return all(length % side == 0 for length, side in zip(lengths, sides, strict=True))


def _kernel_options(q: Tensor, k: Tensor, sides: tuple[int, int], warps: int) -> dict[str, bool | int]:
    # Not left to torch, which sees no divisor of lengths that are symbols, and before 2.14 asks for multiples of 128 of
    # the others: the last tiles of a larger block may lie beyond the tokens all the same.
    options: dict[str, bool | int] = {"IS_DIVISIBLE": are_whole_blocks((q.shape[2], k.shape[2]), sides)}
    if warps and q.dtype.itemsize == 2 and q.shape[3] <= 64:
        options["fwd_num_warps"] = warps
    return options
