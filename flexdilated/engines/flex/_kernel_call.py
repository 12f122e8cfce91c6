"""Calls of FlexAttention: block tables and a mask as a BlockMask, and the kernel options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from ..._torch_private import graph_constant
from ...masks.core import MaskMod, device_kind
from .._features import Features
from ._flash import BLACKWELL, capability
from ._program import Tables

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Kernel = Callable[..., Any]
Options = tuple[tuple[str, bool | int | float | str], ...]

BACKEND = "BACKEND"  # the option by which engine "flash" selects its kernels


def call_kernel(
    kernel: Kernel,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    tables: Tables,
    mask_mod: MaskMod,
    *,
    sides: tuple[int, int],
    features: Features,
    is_complex: bool = False,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"] | None]:
    """Return (out, natural lse) of `kernel`, called like flex_attention; the lse is None without `features.return_lse`.

    tables, mask_mod: the BlockMask's block tables and mask; the tables must be contiguous on accelerators, whose
        kernels do not check.
    sides: (queries, keys) of a block.
    features: its scale, score_mod (a function of the kernel's indices), return_lse and kernel_options are used.
    is_complex: True if the mask has many operations, for which kernels need more registers.
    """
    own: dict[str, Any] = dict(_options_of(features.kernel_options))
    if is_flash(features.kernel_options):
        tables = _narrow_lists(tables)
    elif device_kind(q.device).flex_trains:
        own = {
            "IS_DIVISIBLE": are_whole_blocks((q.shape[2], k.shape[2]), sides),
            **_options_for_registers(q, is_complex, own),
            **own,
        }
    numbers: dict[str, Any] = {"seq_lengths": (q.shape[2], k.shape[2]), "BLOCK_SIZE": sides, **tables}
    mask = BlockMask(**numbers, mask_mod=mask_mod)
    options: dict[str, Any] = {"block_mask": mask, "scale": features.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if features.score_mod is not None:
        options["score_mod"] = features.score_mod
    if own:
        options["kernel_options"] = own
    if not features.return_lse:
        return kernel(q, k, v, **options), None
    out, aux = kernel(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def are_whole_blocks(lengths: tuple[int, int], sides: tuple[int, int]) -> bool:
    """True if both lengths (queries, keys) are multiples of the block's `sides`; kernels then need no bounds checks."""
    # torch's own check does not suffice. It fails for symbolic lengths, whose divisors it does not know. Before 2.14 it
    # also accepts multiples of 128 for larger blocks, the last of which may then extend beyond the tokens.
    return all(length % side == 0 for length, side in zip(lengths, sides, strict=True))


def _options_for_registers(q: Tensor, is_complex: bool, given: Mapping[str, Any]) -> dict[str, int]:
    """Return options that give a kernel more warps or smaller tiles; {} for torch's defaults.

    given: the caller's options. If they have num_warps, which is for forward and backward, the result has neither
        fwd_num_warps nor bwd_num_warps; the same holds for BLOCK_N.
    """
    # Only half-precision kernels run short of registers. At head dims 65 to 128, torch runs the backward on Blackwell
    # with the tiles of Hopper, but with half the warps.
    head_dim, options = q.shape[3], {}
    if q.dtype.itemsize == 2 and head_dim <= 64:
        options = {"fwd_num_warps": 8} if is_complex else {}
    elif q.dtype.itemsize == 2 and head_dim <= 128 and capability(q.device) >= BLACKWELL:
        options = {"bwd_num_warps": 8} | ({"fwd_BLOCK_N": 64} if is_complex else {})
    return {name: value for name, value in options.items() if name.partition("_")[2] not in given}


def _narrow_lists(tables: Tables) -> Tables:
    """Return the block tables, with lists of width 1 where the mask has a single block to list.

    If the mask has one key block, its lists of key blocks get width 1; if it has one query block, its lists of query
    blocks do.
    """
    # Programs pad such lists to width 2, which FlashAttention refuses.
    rows, columns = tables["kv_num_blocks"].shape[2], tables["q_num_blocks"].shape[2]
    single = {"kv_indices": columns == 1, "q_indices": rows == 1}
    return {name: each[..., :1] if single.get(name.removeprefix("full_")) else each for name, each in tables.items()}


def is_flash(kernel_options: str) -> bool:
    """True if the options select FlashAttention's kernels."""
    return BACKEND in dict(_options_of(kernel_options))


@graph_constant
def options_text(options: Options) -> str:
    """Return the options as JSON, the form that ops and compiled functions take; "" for none."""
    return json.dumps(dict(sorted(options))) if options else ""


@graph_constant
def on_flash(text: str) -> str:
    """Return kernel options (JSON) with one more, which selects FlashAttention's kernels."""
    return options_text((*_options_of(text), (BACKEND, "FLASH")))


@graph_constant
def _options_of(text: str) -> Options:
    return tuple(json.loads(text).items()) if text else ()
