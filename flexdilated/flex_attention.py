"""FlexAttention's call, with its names: code that imports it from here trains on CPU too.

    from flexdilated.flex_attention import create_block_mask, flex_attention

It replaces `torch.nn.attention.flex_attention`, which has no backward on CPU and, uncompiled, forms all scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import flex_attention as _torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from . import _torch_private
from ._attend import attend, autocast
from ._validate import expand_batch, scaled
from .engines import ScoreMod, fixed_score_mod, largest_scores, sum_dtype
from .masks import block_mask as block_mask_of
from .masks import every
from .masks.core import MaskMod, Mixture, Pattern, advises, device_kind, outside_torch_modes, suspended_torch_modes
from .masks.patterns import (
    block_lists,
    digest_of_mask_mod,
    partial_and_full_blocks,
    pattern_of_block_mask,
    rules_of_mask_mod,
)

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values
# R query blocks, C key blocks

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


@advises(
    keywords={"engine": "write fd.attend(query, key, value, masks.custom(block_mask), engine=)"},
    how="write flex_attention(query, key, value, block_mask=)",
)
def flex_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "#B G M D"],
    value: Float[Tensor, "#B G M E"],
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention as `torch.nn.attention.flex_attention.flex_attention`, computed by `attend`, forward and backward.

    Returns the output (B, H, N, E), with batch, heads and tokens ordered in memory as in query; with return_lse
    (output, natural lse (B, H, N)); with return_aux (output, `AuxOutput`). A row without keys has output 0, and lse and
    largest score -inf.

    score_mod: (score, b, h, q_idx, k_idx) -> score, or None. Gradients reach the tensors that it reads.
    block_mask: from `create_block_mask` here or in torch; None for all pairs. Its block lists count even if they do not
        follow from its mask_mod: see `masks.custom`.
    scale: factor on the scores; None for 1 / sqrt(D).
    enable_gqa: True allows G to be a divisor of H.
    kernel_options: on CUDA and XPU, as in `attend`; in a compiled graph, as in torch; else without effect.
    return_aux: names the fields of `AuxOutput` to compute: lse, and max_scores (B, H, N), the largest score of each row
        after score_mod, without a gradient. Fields that it does not name are None.

    An eager call reads block lists, mask_mod and score_mod, so the host waits for an accelerator; later changes of them
    have no effect on the call's backward. In a function that torch.compile compiles, torch's own flex_attention is
    called on all devices but CPU, and on CPU under torch.no_grad without lse and max_scores; otherwise the graph breaks
    here, and the call runs eagerly.

    An eager call raises ValueError for tensors that do not fit each other or the block_mask, and for return_lse with
    return_aux; TypeError for a block_mask that is no BlockMask; TypeError or ValueError for functions that cannot be
    recorded.

    >>> q, k, v = torch.randn(3, 1, 2, 256, 16, requires_grad=True)
    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    >>> flex_attention(q, k, v, block_mask=mask).sum().backward()

    Source: FlexAttention, arXiv 2412.05496.
    """
    if return_aux is not None and return_lse:
        raise ValueError("return_lse and return_aux ask for the same: leave return_lse out")
    wants = return_aux or AuxRequest(lse=return_lse)
    if torch.compiler.is_compiling():
        trains = device_kind(query.device).flex_trains
        if trains or not (wants.lse or wants.max_scores or torch.is_grad_enabled()):
            options: Any = kernel_options
            return _torch.flex_attention(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, options, return_aux=return_aux
            )
    # Disabled where nothing is compiled, too: torch.compile may run this function uncompiled, and trace what it calls.
    compute: Any = torch.compiler.disable(_out_and_aux)
    out, aux = compute(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, wants)
    if return_aux is not None:
        return out, aux
    return (out, aux.lse) if return_lse else out


def _out_and_aux(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
    wants: AuxRequest,
) -> tuple[Tensor, AuxOutput]:
    """Return (out, `AuxOutput`) of a call of `flex_attention`; fields that `wants` does not name are None."""
    if block_mask is None or query.dim() != 4 or key.dim() != 4:  # `attend` refuses other numbers of dims
        pattern = every()
    else:
        pattern = _pattern_of(block_mask, query, key)
    on_triton = device_kind(query.device).engine == "flex"
    out, lse = attend(
        query,
        key,
        value,
        pattern,
        score_mod=score_mod,
        scale=scale,
        enable_gqa=enable_gqa,
        kernel_options=kernel_options if on_triton else None,
        q_offset=0,
        return_lse=True,
    )
    largest = _largest_scores(query, key, pattern, score_mod, scale) if wants.max_scores else None
    return _in_order_of(query, out), AuxOutput(lse=lse if wants.lse else None, max_scores=largest)


def _largest_scores(
    query: Tensor, key: Tensor, pattern: Pattern, score_mod: ScoreMod | None, scale: float | None
) -> Float[Tensor, "B H N"]:
    """Return the largest score of each row after score_mod, -inf for a row without keys. `attend` has checked the call.

    Tensors without values, which are on the meta device or of a FakeTensorMode, give only -inf.
    """
    q, k, _ = expand_batch(*autocast(query, key, key))
    if 0 in (*q.shape, *k.shape) or q.is_meta or isinstance(q, _torch_private.FakeTensor):
        return q.new_full(q.shape[:3], -torch.inf, dtype=sum_dtype(q))
    mask = block_mask_of(pattern, q.shape[2], k.shape[2], num_heads=q.shape[1], device=q.device)
    q, factor = scaled(q, scale, q.shape[3])
    return largest_scores(q, k, mask, factor, fixed_score_mod(score_mod, sum_dtype(q), q.device))


def _in_order_of(query: Float[Tensor, "B H N D"], out: Float[Tensor, "B H N E"]) -> Float[Tensor, "B H N E"]:
    """Return `out` with batch entries, heads and tokens ordered in memory as in query, and the head dim contiguous."""
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


_KNOWN = "_flexdilated_pattern"  # attribute of a BlockMask


class _KnownPattern(NamedTuple):
    """The pattern of a BlockMask, with the values from which it was made, to see later if they have changed.

    lists: copies of the block lists.
    rule_and_sizes: text with a digest of the mask_mod, from `digest_of_mask_mod`, the lengths and the block size.
    """

    lists: list[Tensor]
    rule_and_sizes: str
    pattern: Pattern

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled BlockMask has None here, so that its pattern is made again


def _check_sizes(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Raise ValueError if a BlockMask is for other numbers of queries, keys, batch entries or heads.

    Lists of 1 batch entry or head fit any number.
    """
    (entries, heads, num_queries), num_keys = query.shape[:3], key.shape[2]
    lengths = tuple(map(int, block_mask.seq_lengths))
    if lengths != (num_queries, num_keys):
        is_larger = lengths[0] >= num_queries and lengths[1] >= num_keys
        crop = f", or crop it by block_mask._adjust({num_queries}, {num_keys})" if is_larger else ""
        raise ValueError(
            f"block_mask must be for {num_queries} queries and {num_keys} keys; got one for {lengths[0]} and "
            f"{lengths[1]}: create another one{crop}"
        )
    listed = (1, 1, *block_mask.kv_num_blocks.shape[:-1])[-2:]
    if listed[0] not in (1, entries) or listed[1] not in (1, heads):
        raise ValueError(
            f"block_mask must have lists for the {entries} batch entries and {heads} heads of query, or for 1 that all "
            f"share; got {listed[0]} and {listed[1]}: create another one, with B={entries} or None, H={heads} or None"
        )


def _pattern_of(block_mask: BlockMask, query: Tensor, key: Tensor) -> Pattern:
    """Return the pattern of a BlockMask, kept from the last call if its lists, mask_mod and sizes are unchanged.

    Raises TypeError if block_mask is no BlockMask, ValueError if its sizes do not fit query and key, and TypeError or
    ValueError if its mask_mod cannot be recorded.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_mask must be a BlockMask or None; for a pattern write fd.attend(query, key, value, pattern), or "
            f"create_block_mask(pattern, B, H, Q_LEN, KV_LEN); got {block_mask!r:.80}"
        )
    _check_sizes(block_mask, query, key)
    entries, lists = max(1, len(query)), block_lists(block_mask)
    sizes, known = (block_mask.seq_lengths, block_mask.BLOCK_SIZE), getattr(block_mask, _KNOWN, None)
    rule_and_sizes = f"{digest_of_mask_mod(block_mask.mask_mod, entries)}, {sizes}"
    if known is not None and known.rule_and_sizes == rule_and_sizes and _all_equal(known.lists, lists):
        return known.pattern
    pattern = pattern_of_block_mask(block_mask, entries)
    with suspended_torch_modes():
        # With the mask, which its pattern may hold: a dict of masks would keep both.
        setattr(block_mask, _KNOWN, _KnownPattern([table.clone() for table in lists], rule_and_sizes, pattern))
    return pattern


@outside_torch_modes
def _all_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


_OF_FLASH = "it serves a backward of torch's FLASH kernels, which are not called here: leave it out"


@advises(
    keywords=dict.fromkeys(("compute_dq_write_order", "dq_kv_order"), _OF_FLASH),
    how="write create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
)
def create_block_mask(
    mask_mod: MaskMod | Pattern,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """Return torch's BlockMask of a mask_mod, with the lists of torch's `create_block_mask`.

    mask_mod: (b, h, q_idx, kv_idx) -> bool, or a pattern of `masks`, whose lists follow from closed forms.
    B, H: numbers of batch entries and of query heads that have separate lists; None for 1. With B None or 1, all
        entries share the lists of the mask_mod at b = 0, as in torch.
    Q_LEN, KV_LEN: numbers of queries and keys.
    device: of the lists; None for the accelerator, if there is one, as in torch.
    BLOCK_SIZE: tokens of a block, or (queries, keys).
    _compile: without effect.
    separate_full_blocks: if False, full blocks are listed as partial ones.

    In a function that torch.compile compiles, the graph breaks at this call.

    Raises TypeError or ValueError for a function that `masks.custom` cannot record, and ValueError for a pattern in
    which a pair may count more than once, or with run-time tensors for another number of batch entries than B.

    >>> create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256).shape
    (1, 1, 256, 256)
    """
    create: Any = torch.compiler.disable(_new_block_mask)  # always, as in `flex_attention`
    return create(mask_mod, (B or 1, H or 1), (Q_LEN, KV_LEN), device, BLOCK_SIZE, separate_full_blocks)


def _new_block_mask(
    mask_mod: MaskMod | Pattern,
    shape: tuple[int, int],
    lengths: tuple[int, int],
    device: torch.device | str | None,
    block_size: int | tuple[int, int],
    separate_full_blocks: bool,
) -> BlockMask:
    """Return the result of `create_block_mask`. shape: batch entries and heads. lengths: queries and keys."""
    if isinstance(mask_mod, Mixture):
        raise ValueError("a BlockMask counts each pair once: give one pattern, or call attend with the mixture")
    # In the caller's modes: to record a function is to follow what torch calls.
    rules = [mask_mod] if isinstance(mask_mod, Pattern) else rules_of_mask_mod(mask_mod, shape[0])
    rules = rules[:1] if all(rule is rules[0] for rule in rules) else rules
    where, (entries, heads) = torch.device(device or torch.accelerator.current_accelerator() or "cpu"), shape
    with suspended_torch_modes():
        function = _PatternRule(mask_mod, *shape, *lengths, where) if isinstance(mask_mod, Pattern) else mask_mod
        tables = []
        for rule in rules:
            made = block_mask_of(rule, *lengths, num_heads=heads, block_size=block_size)
            tables.append(torch.stack(partial_and_full_blocks(made)).expand(-1, -1, heads, -1, -1))
        if len(rules) == 1 and tables[0].shape[1] not in (1, entries):
            raise ValueError(f"B must be {tables[0].shape[1]}, as the pattern has as many batch entries; got {entries}")
        partial, full = torch.cat(tables, 1).expand(-1, entries, -1, -1, -1)
        if not separate_full_blocks:
            partial, full = partial | full, None
        return BlockMask.from_kv_blocks(
            *_torch_lists(partial, where),
            *((None, None) if full is None else _torch_lists(full, where)),
            BLOCK_SIZE=block_size,
            mask_mod=function,
            seq_lengths=lengths,
        )


class _PatternRule:
    """A mask_mod that computes a pattern bound to the given sizes, with its tensors on `device`."""

    def __init__(
        self, pattern: Pattern, batch: int, num_heads: int, num_queries: int, num_keys: int, device: torch.device
    ) -> None:
        self.given = pattern, batch, num_heads, num_queries, num_keys, device
        bound = pattern.bind(num_heads=num_heads, num_queries=num_queries, num_keys=num_keys, batch=batch)
        self.function = bound.mask_mod(device)

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.function(b, h, q, k)

    def __reduce__(self) -> tuple[Any, ...]:
        return _PatternRule, self.given


def _torch_lists(blocks: Bool[Tensor, "B H R C"], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return torch's block lists: (number of True key blocks of each query block, their indices), int32 on `device`.

    The indices of True blocks come first; both they and the indices of False blocks ascend: for a query block with
    [False, True, False] the lists are 1, [1, 0, 2].
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).to(device), order.to(device, torch.int32)
