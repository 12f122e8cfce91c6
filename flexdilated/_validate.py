"""Checks on the arguments of `attend`, before any work; each error states the rule, then the argument."""

from collections.abc import Mapping
from functools import lru_cache
from sys import float_info
from typing import NamedTuple
from warnings import warn

import torch
from torch import Tensor

from ._torch_private import check, graph_constant
from .masks import Layout, Mixture, Pattern
from .masks.attended import causal_by_form
from .masks.core import LARGEST, Expression, refused_arguments, renamed, require_int
from .masks.patterns import SelectedBlocks, missing, names, require_values, run_time_leaves
from .masks.text import read_text

_CAUSAL = "write `pattern & masks.causal()`, or masks.causal() as the pattern"
_MATRIX = (
    "for a mask of pairs write masks.mask(allowed), True for each pair that takes part, as the pattern, for padding "
    "write masks.visible_keys(real), True for real tokens, for numbers that are added to scores write score_mod="
)
_PADDING = "write `pattern & masks.visible_keys(~key_padding_mask)`, or masks.lengths(lengths)"
_WINDOW = "write `pattern & masks.local_window(left=, right=)`"
_BIAS = "a score_mod adds one, lambda score, b, h, q_idx, k_idx: score + bias[h, q_idx, k_idx]"
_SCALE = "write scale=, the factor on scores"
# Keywords of other attention functions, and what to write here instead.
OTHER_KEYWORDS = {
    **dict.fromkeys(("is_causal", "causal"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "mask", "attention_mask"), _MATRIX),
    **dict.fromkeys(("mask_mod", "block_mask"), "give it as the pattern, masks.custom(mask_mod)"),
    **dict.fromkeys(("key_padding_mask", "padding_mask"), _PADDING),
    **dict.fromkeys(("window", "window_size"), _WINDOW),
    **dict.fromkeys(("sm_scale", "softmax_scale"), _SCALE),
    **renamed(
        q="query Q queries",
        k="key K keys",
        v="value V values",
        enable_gqa="gqa is_gqa",
        return_lse="lse need_lse",
        block_size="block",
        engine="backend implementation attn_implementation",
        num_heads_global="num_heads",
        q_offset="offset position start_pos cache_position",
    ),
    "dropout": "attend and distributed.attend take dropout_p=; elsewhere write torch.nn.functional.dropout(out)",
    **dict.fromkeys(("bias", "attn_bias"), _BIAS),
    "num_kv_heads": "k and v may have fewer heads with enable_gqa=True",
    "cache": "write cache.attend(q, k, v), of an fd.KVCache",
    "mesh": "write fd.distributed.attend(q, k, v, pattern, mesh=mesh)",
    "need_weights": "attention weights are never formed: return_lse=True gives their denominators",
    "kernel_options": "only flexdilated.attend takes them; engine= and block_size= choose the kernel",
    **dict.fromkeys(("device", "dtype"), "q, k and v determine it"),
    **dict.fromkeys(("segment_lengths", "dilation_rates"), "write masks.longnet(segment_lengths, dilation_rates)"),
    "batch_first": "q, k and v are (batch, heads, tokens, head dim)",
    "deterministic": "it follows torch.use_deterministic_algorithms",
}

# FlexAttention's kernel options that are determined by block lists, lengths and results of a call.
_DETERMINED = ("SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE", "HAS_FULL_BLOCKS", "IS_DIVISIBLE", "GQA_SHARED_HEADS")
_DETERMINED += ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "SM_SCALE", "FORCE_USE_FLEX_ATTENTION")

_MANY_HEADS = 256  # more query heads than models have: beyond, heads and tokens may be transposed
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> None:
    """Raise TypeError or ValueError unless q (B, H, N, D), k (B, G, M, D) and v (B, G, M, E) fit together.

    They must be dense, on one device, and all in float32, bfloat16, float16 or float64. G, the number of key/value
    heads, must be H or, with enable_gqa, a divisor of H. Warns, except while torch.compile traces, if heads and tokens
    look transposed.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            as_tensor = f": write torch.as_tensor({name})" if type(tensor).__name__ in ("ndarray", "list") else ""
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}{as_tensor}")
        require_dense(name, tensor)
        if tensor.dim() != 4:
            split = f"{name}.unflatten(-1, (heads, -1)).transpose(-3, -2)"
            advice = f"; to split the width into heads write {split}" if tensor.dim() in (2, 3) else ""
            advice = f": {name}[None] adds a batch dim{advice}" if advice else ""
            raise ValueError(
                f"{name} must have the 4 dims (batch, heads, tokens, head dim); got {_shape(tensor)}{advice}"
            )
        if tensor.dtype not in _DTYPES:
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            came = f"{tensor.dtype}: write {name}.float(), or embed and project token ids" if whole else tensor.dtype
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {came}")
    if not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise ValueError(f"q, k and v must have one dtype; got {dtypes}: cast them, or call under torch.autocast")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")
    if k.shape[:3] != v.shape[:3]:
        turned = ": give k in the order of v's dims, not transposed" if k.shape == v.transpose(-2, -1).shape else ""
        rule = "k and v must have one shape, except for the head dim"
        raise ValueError(f"{rule}; got {_shape(k)} and {_shape(v)}{turned}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shared = k.shape[0] == 1 and q.shape[3] == k.shape[3]
        advice = f": write k.expand({q.shape[0]}, -1, -1, -1), and the same of v" if shared else ""
        raise ValueError(f"q, k and v must agree in batch and head dim; got q {_shape(q)} and k {_shape(k)}{advice}")
    if not q.shape[3] or not v.shape[3]:
        raise ValueError(f"the head dim must be at least 1; got q {_shape(q)} and v {_shape(v)}")
    _check_heads(q.shape[1], k.shape[1], enable_gqa)
    if not torch.compiler.is_compiling() and q.shape[1] > max(_MANY_HEADS, q.shape[2]):
        warn(
            f"q has {q.shape[1]} heads of {q.shape[2]} tokens, in the order (batch, heads, tokens, head dim): where "
            "tokens come before heads, give q, k and v as x.transpose(1, 2)",
            stacklevel=4,
        )


def expand_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, v) with k and v of batch 1 expanded to the batch of q; their gradients are sums over that batch.

    Other inputs are returned unchanged, also invalid ones, which `check_tensors` refuses.
    """
    plain = all(isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested for x in (q, k, v))
    if (
        plain
        and q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] != k.shape[0]
        and k.shape[0] == 1
        and v.shape[0] == 1
    ):
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return q, k, v


def require_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a nested, sparse or distributed tensor, or one of another layout than torch.strided.

    name: name of the tensor's argument, for the error.
    """
    if type(tensor).__name__ == "DTensor":  # by name, because importing the class imports torch.distributed
        raise ValueError(
            f"{name} must be a plain tensor and no DTensor: pass this rank's part, from to_local(), with "
            "head_offset= and num_heads_global= if heads are sharded; if tokens are sharded, pass the parts to "
            f"flexdilated.distributed.attend(..., mesh=); got placements {tensor.placements}"  # type: ignore[attr-defined]
        )
    if not tensor.is_nested and tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, such as {name}.to_dense(); got layout {tensor.layout}")
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor; got a nested one: call once for each sequence, pad them and give a "
            "key_padding_mask, or pack them and take masks.documents. Where torch's encoder made it, build "
            "nn.TransformerEncoder(..., enable_nested_tensor=False), or set use_nested_tensor = False on it"
        )


def check_kernel_options(options: object, engine: str) -> tuple[tuple[str, bool | int | float | str], ...]:
    """Return FlexAttention's kernel options, a mapping or None, as a tuple of (name, value) pairs; () for None.

    Raises TypeError unless they map names to plain values, and ValueError for an engine other than "flex" and "flash"
    and for options that the call itself determines.
    """
    if options is None:
        return ()
    if not isinstance(options, Mapping):
        raise TypeError(f"kernel_options must be a mapping of names to plain values; got {type(options).__name__}")
    if engine not in ("flex", "flash"):
        raise ValueError(f"kernel_options are for engines 'flex' and 'flash', which call FlexAttention; got {engine=}")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
            came = f"{name!r}: {type(value).__name__}"
            raise TypeError(f"kernel_options must map names to plain values (bool, int, float, str); got {came}")
        if name == "BACKEND":
            raise ValueError(
                f"kernel_options may not hold BACKEND: write engine='flash' or 'flex'; got BACKEND={value!r}"
            )
        if name.removeprefix("fwd_").removeprefix("bwd_") in _DETERMINED:
            raise ValueError(
                f"kernel_options may not hold {name}, which attend sets: for block sizes write block_size="
            )
    return tuple(options.items())


def check_sinks(sinks: object, q: Tensor) -> None:
    """Raise TypeError or ValueError unless sinks is None or a float tensor (H,) on the device of q (B, H, N, D)."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a tensor or None; got {type(sinks).__name__}")
    require_dense("sinks", sinks)
    if sinks.dtype not in _DTYPES:
        raise TypeError(f"sinks must be float32, bfloat16, float16 or float64; got {sinks.dtype}")
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have one logit for each head of q, shape ({q.shape[1]},); got {_shape(sinks)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}; got {sinks.device}")


def check_lse(lse: object, q: Tensor) -> None:
    """Raise TypeError or ValueError unless lse is float32 or float64, (B, H, N), on the device of q (B, H, N, D)."""
    if not isinstance(lse, Tensor):
        raise TypeError(f"lse must be the tensor that attend(..., return_lse=True) gives; got {type(lse).__name__}")
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lse must be float32 or float64, as attend gives it; got {lse.dtype}")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have the shape {tuple(q.shape[:3])} of q without its head dim; got {_shape(lse)}")
    if lse.device != q.device:
        raise ValueError(f"lse must be on the device of q, {q.device}; got {lse.device}")


def check_score_mod(score_mod: object) -> None:
    """Raise TypeError unless score_mod is None or can be called with (score, b, h, q_idx, k_idx).

    Nothing is checked while torch.compile traces.
    """
    if score_mod is None or torch.compiler.is_compiling():  # the compiler calls it
        return
    if not callable(score_mod):
        raise TypeError(f"score_mod must be a function of (score, b, h, q_idx, k_idx); got {type(score_mod).__name__}")
    takes = refused_arguments(score_mod, 5)
    if takes is not None:
        raise TypeError(f"score_mod must take (score, b, h, q_idx, k_idx); got {takes}")


Scale = float | Tensor | None  # argument `scale` of a call: see `scaled`


class Place(NamedTuple):
    """Offsets of the tokens and heads of a call, their layout, and the block size: arguments of `attend`, by name."""

    q_offset: int = 0
    k_offset: int = 0
    head_offset: int = 0
    num_heads_global: int | None = None
    layout: Layout | None = None
    block_size: int | tuple[int, int] | None = None


_DEFAULT_PLACE = Place()


def check_zero_keys(
    pattern: Expression, score_mod: object, queries: int = 0, keys: int = 0, place: Place = _DEFAULT_PLACE
) -> None:
    """Raise ValueError if the pattern pads segments with zero keys and the call does not allow that.

    Such a pattern needs all keys of the sequence (k_offset 0), queries within it, and no score_mod. Other patterns
    pass.

    queries, keys: numbers of queries and keys; without them and `place`, only score_mod is checked.
    """
    if not pattern.pads:
        return
    if score_mod is not None:
        raise ValueError("padding='zeros' takes no score_mod, as zero keys have no position to give it; got one")
    if place.k_offset or place.q_offset + queries > keys:
        raise ValueError(
            "padding='zeros' is made for a whole sequence: give all its keys, and queries at their positions; got "
            f"{queries} queries from {place.q_offset} on and {keys} keys from {place.k_offset} on"
        )


def require_q_offset(pattern: Expression, queries: int, keys: int) -> None:
    """Raise ValueError if there are fewer queries (1 or more) than keys, and every branch is causal by its form.

    For calls without q_offset: the queries are likely to be the last tokens, not the first. queries, keys: numbers of
    queries and keys. Nothing is checked while torch.compile traces.
    """
    if not torch.compiler.is_compiling() and 0 < queries < keys and all(map(causal_by_form, pattern.branches())):
        raise ValueError(
            "a causal pattern with fewer queries than keys needs q_offset, the position of the first query: write "
            f"q_offset={keys - queries} if the queries are the last tokens, or q_offset=0 if they are the first; got "
            f"{queries} queries and {keys} keys"
        )


def _check_heads(num_heads: int, num_kv_heads: int, enable_gqa: bool) -> None:
    came = f"got {num_heads} and {num_kv_heads} in dim 1: if tokens come before heads, write x.transpose(1, 2)"
    if num_heads % max(1, num_kv_heads) or (num_heads and not num_kv_heads):
        raise ValueError(f"the number of query heads must be a multiple of the number of key/value heads; {came}")
    if num_heads != num_kv_heads and not enable_gqa:
        raise ValueError(f"unequal numbers of query and key/value heads need enable_gqa=True; {came}")


def scaled(q: Tensor, scale: Scale, head_dim: int) -> tuple[Tensor, float]:
    """Return (queries, factor on the scores) for the argument `scale` of q (B, H, N, D).

    If scale is a tensor, of one number for each head (H,) or one for all, the queries are q times scale, computed in
    float32 or wider and rounded to the dtype of q, and the factor is 1. Else the queries are q, and the factor is
    `resolve_scale(scale, head_dim)`.

    Raises TypeError or ValueError for other tensors, and as `resolve_scale`.
    """
    if not isinstance(scale, Tensor):
        return q, resolve_scale(scale, head_dim)
    if not scale.is_floating_point():
        raise TypeError(f"a tensor as scale must hold real numbers; got {scale.dtype}")
    if scale.shape not in ((), (q.shape[1],)):
        raise ValueError(f"a tensor as scale needs a number for each head, shape ({q.shape[1]},); got {_shape(scale)}")
    if scale.device != q.device:
        raise ValueError(f"scale must be on the device of q, {q.device}; got {scale.device}")
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.to(wide) * scale.to(wide).reshape(-1, 1, 1)).to(q.dtype), 1.0


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor on the scores as a float: `scale`, or 1 / sqrt(head_dim) for None.

    Raises TypeError unless scale is a float, an int (no bool) or None, and ValueError if it is not finite.
    """
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a real number or None; got {scale!r:.80}")
    if not -float_info.max <= scale <= float_info.max:  # torch.compile can trace this comparison for a varying scale
        raise ValueError(f"scale must be finite; got {scale=}")
    return float(scale)


def offset_as_int(name: str, value: object) -> int:
    """Return an offset as a number: an integer tensor of shape () is read on the host.

    name: name of the argument, for errors.

    A value that is no tensor is returned unchanged, for `check_sizes` to check. Raises TypeError for other tensors.
    """
    if not isinstance(value, Tensor):
        return value  # type: ignore[return-value]
    if value.dim() or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(
            f"{name} must be an integer, or an integer tensor of shape (), such as cache_position[0]; "
            f"got a tensor of {value.dtype} and shape {_shape(value)}"
        )
    number = value.item()
    assert isinstance(number, int)
    if torch.compiler.is_compiling():  # tells the compiler what the later checks require of an unknown value
        check(number >= 0)
        check(number <= LARGEST)
    return number


def check_sizes(pattern: Pattern | Mixture, q: Tensor, place: Place) -> int:
    """Return the number of query heads over all devices, after checking offsets and heads of a call.

    The number is num_heads_global or, if None, head_offset + H for q (B, H, N, D). Raises TypeError or ValueError for
    offsets and a num_heads_global that are no integers or out of range, for more heads than num_heads_global and,
    except while torch.compile traces, for a pattern that does not accept this number of heads.
    """
    head_offset, num_heads_global = place.head_offset, place.num_heads_global
    require_int("q_offset", place.q_offset, minimum=0)
    require_int("k_offset", place.k_offset, minimum=0)
    require_int("head_offset", head_offset, minimum=0)
    if num_heads_global is not None:
        require_int("num_heads_global", num_heads_global, minimum=1)
    heads = head_offset + q.shape[1] if num_heads_global is None else num_heads_global
    if head_offset + q.shape[1] > heads:
        raise ValueError(
            f"num_heads_global must be at least head_offset plus the heads of q; got {head_offset=}, {q.shape[1]} "
            f"heads and num_heads_global={heads}"
        )
    if not torch.compiler.is_compiling():  # in a trace the op's shape rule checks the pattern, outside the graph
        pattern.check_heads(heads)
    return heads


def run_time_tensors(
    pattern: Pattern | Mixture, bindings: Mapping[str, Tensor] | None, *, batch: int = 1, has_values: bool = True
) -> list[Tensor]:
    """Return the run-time tensors that a pattern needs, sorted by name; sparse ones are packed into dense ones.

    They are on the CPU, except tables of selected keys or blocks, which stay on their device.

    bindings: {name: tensor} for the tensors that the pattern does not hold.
    batch: number of batch entries of the call.
    has_values: False for a call with meta tensors; the result is then empty.

    Raises TypeError or ValueError for a tensor that is missing, unknown, passed twice or of a type or dtype that the
    pattern does not take, and ValueError for a table of selected keys or blocks with 3 dims if dim 0, of groups of
    heads, has size `batch` > 1: it may be meant for entries. While torch.compile traces, a sparse tensor raises
    ValueError.
    """
    if bindings is not None and not isinstance(bindings, Mapping):
        raise TypeError(f"bindings must map names to tensors; got {type(bindings).__name__}")
    needed = _needed_names(pattern.text) if torch.compiler.is_compiling() else names(pattern)
    if not needed and not bindings:
        return []
    carried, given = pattern.given_tensors(), {} if bindings is None else dict(bindings)
    for name in given:
        if name not in needed:
            known = f"needs {', '.join(map(repr, needed))}" if needed else "needs no run-time tensor"
            raise ValueError(f"bindings must name run-time tensors of the pattern, which {known}; got {name!r}")
        if name in carried:
            raise ValueError(f"bindings must not name a run-time tensor that the pattern holds; got {name!r}")
    found = carried | given
    for name in needed:
        if name not in found:
            raise ValueError(missing(name))
    if not has_values:
        return []
    stay = _names_left_on_device(pattern.text)
    if torch.compiler.is_compiling():
        values = {name: require_values(name, found[name]) for name in needed}
    else:
        leaves = {leaf.name: leaf for leaf in run_time_leaves(pattern)}
        values = {name: leaves[name].transported(found[name]) for name in needed}
    for name in stay:
        if values[name].dim() == 3 and 1 < batch == len(values[name]):
            raise ValueError(
                f"{name} of shape {tuple(values[name].shape)} may be a table for each of {batch} batch entries or for "
                f"each of {batch} groups of heads: write table[:, None] for entries, or table[None] for heads"
            )
    return [x if name in stay else x.cpu() for name, x in values.items()]


@graph_constant  # tracing through every part of a pattern takes longer than all other checks together
def _needed_names(pattern: str) -> tuple[str, ...]:
    return names(read_text(pattern))


@graph_constant
def _names_left_on_device(pattern: str) -> tuple[str, ...]:
    """Return the names of a pattern's tables of selected keys or blocks, which stay on their device. pattern: JSON."""
    return _names_of_block_tables(pattern) if '"kind":"selected_blocks"' in pattern else ()


@lru_cache(maxsize=256)
def _names_of_block_tables(pattern: str) -> tuple[str, ...]:
    return tuple(leaf.name for leaf in run_time_leaves(read_text(pattern)) if isinstance(leaf, SelectedBlocks))


def check_layout(layout: Layout | None, q: Tensor, k: Tensor) -> None:
    """Raise TypeError or ValueError unless layout is None or a `Layout` with the number of tokens of q and of k."""
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must come from masks.layout; got {type(layout).__name__}")
    if not layout.num_tokens == q.shape[2] == k.shape[2]:
        raise ValueError(
            f"layout must be for {q.shape[2]} queries and {k.shape[2]} keys; got one for {layout.num_tokens} tokens"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
