"""Choice of the engine that computes a call of `attend`, and the reasons why an engine cannot compute it.

An engine that the caller names raises ValueError for a call that it cannot serve; a default is replaced by "portable".
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import _torch_private
from ._torch_private import graph_constant
from .engines import (
    Features,
    ScoreMod,
    exports_to_onnx,
    flash_cannot,
    is_transformed,
    missing_compiler,
    own_op,
    tensors_read,
)
from .masks import Mixture, Pattern
from .masks.core import LARGEST, device_kind, outside_torch_modes
from .masks.plan_cache import debug_wanted, log, shortened_line

ENGINES = ("flex", "flash", "aten", "portable", "reference")
_MIN_FLEX_HEAD_DIM = 16  # of FlexAttention's Triton kernels


def check_engine(engine: object) -> None:
    """Raise ValueError unless `engine` is None, "flex", "flash", "aten", "portable" or "reference"."""
    if engine == "tiles":
        raise ValueError('engine "tiles" is called "aten" now, after the kernels that it runs')
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine must be None or one of {', '.join(map(repr, ENGINES))}; got {engine=}")


def choose_engine(
    engine: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Mixture,
    features: Features,
    sides: tuple[int, ...] = (),
) -> str:
    """Return the name of the engine that computes a call of `attend` with these arguments.

    engine: the caller's choice. None: "aten" on CPU, "flex" where Triton serves the device, and "portable" elsewhere
        and for calls that these cannot serve. For meta tensors the result is always "aten"; in an export to ONNX it is
        "reference".
    sides: requested block size in tokens, (queries, keys); () for none.

    Raises ValueError, with the reason, for an unknown engine, for a named one that cannot serve the call, if neither
    the default nor "portable" can, and in an export to ONNX for a call without a dense form in plain operations. The
    pattern is not checked for "aten" on CUDA, which computes only branches that are dense or causal.
    """
    check_engine(engine)
    if q.is_meta:
        return "aten"  # meta tensors need only shapes and dtypes, which are equal in all engines
    if exports_to_onnx():
        _check_onnx(engine, q, k, pattern, features)
        return "reference"
    chosen, reason = engine or device_kind(q.device).engine, None
    if chosen == "reference" and torch.compiler.is_compiling():
        reason = "reference runs eagerly only; engine='aten' (on CPU), 'flex' and 'portable' compile"
    elif chosen == "aten":
        reason = _aten_cannot(q.device, q.dtype, features.score_mod, features.drops)
    elif chosen != "reference":
        if is_transformed():
            check_transforms([q, k, v, *feature_tensors(features, q)])
        if chosen == "flex":
            reason = _flex_cannot(q, k, v, pattern, features)
        elif chosen == "flash":
            reason = _flash_cannot(q, k, v, features, sides)
        else:
            reason = _portable_cannot(features)
    why = f"the default on {q.device.type}" if engine is None else "as the caller names it"
    if reason is not None and engine is None:
        if is_transformed():
            check_transforms([q, k, v, *feature_tensors(features, q)])
        chosen, why, reason = "portable", f"as {reason}", _portable_cannot(features)
    if reason is not None:
        raise ValueError(reason)
    # Not in a trace: logging would break the graph.
    if not torch.compiler.is_compiling() and debug_wanted():
        _log_once(f"engine {chosen!r}, {why}: {_call_text(q, k, pattern)}")
    return chosen


def planned_engine(
    engine: str | None, device: str, dtype: torch.dtype, head_dim: int, *, score_mod: ScoreMod | None, drops: bool
) -> str:
    """Return the name of the engine for which `fd.plan` plans a call of `attend`, by the rules of `choose_engine`.

    engine: "portable" or the device's default; None: the default, or "portable" if the default cannot serve the call.
    device: kind of device, such as "cpu"; "cuda" is assumed to have Triton.
    head_dim: the smaller of the head dims of queries and values.

    Raises ValueError for another engine, and if a named one cannot serve the call.
    """
    chosen = device_kind(device).engine if engine is None else engine
    choices = (device_kind(device).engine, "portable")
    if chosen not in choices:
        raise ValueError(f"engine must be None, {choices[0]!r} or 'portable' to plan for {device}; got {engine=}")
    reason = None
    if chosen == "aten":
        reason = _aten_cannot(torch.device(device), dtype, score_mod, drops)
    elif chosen == "flex":
        reason = _flex_cannot_take_head_dim(device, head_dim)
    if reason is not None and engine is not None:
        raise ValueError(reason)
    return chosen if reason is None else "portable"


def default_engine(device: str) -> str:
    """Return the name of the engine that `attend` takes by default on a kind of device of this machine, such as "cpu".

    Calls that this engine cannot serve are computed by "portable".
    """
    engine = device_kind(device).engine
    return "portable" if engine == "flex" and _flex_cannot_compile(device) else engine


@lru_cache(maxsize=4096)
def _log_once(line: str) -> None:
    """Log a line at level DEBUG, but only once: otherwise every layer of every training step would repeat it."""
    log.debug(line)


def _call_text(q: Tensor, k: Tensor, pattern: Pattern | Mixture) -> str:
    sizes = f"{q.shape[1]} heads, {q.shape[2]} queries, {k.shape[2]} keys, head dim {q.shape[3]}"
    return f"{shortened_line(pattern)}, {sizes}, {q.dtype} on {q.device}"


def feature_tensors(features: Features, q: Tensor) -> list[Tensor]:
    """Return the sinks, if any, and the tensors that score_mod reads: they may carry derivatives, as q, k and v may."""
    found = [] if features.sinks is None else [features.sinks]
    return found if features.score_mod is None else [*found, *tensors_read(features.score_mod, q)]


@own_op("flexdilated::attend")  # the name with which its error begins
def check_transforms(inputs: list[Tensor]) -> Tensor:
    """Raise ValueError if an input is mapped by vmap or carries a forward-mode or torch.func derivative.

    `own_op` raises the error. This function is an op, so that a compiled graph checks too; it returns an empty tensor.
    """
    return inputs[0].new_empty(0)


@check_transforms.register_fake
def _(inputs):
    return inputs[0].new_empty(0)


def _check_onnx(engine: str | None, q: Tensor, k: Tensor, pattern: Pattern | Mixture, features: Features) -> None:
    """Raise ValueError for a call that cannot be exported to ONNX as dense attention in plain operations."""
    if not torch.compiler.is_exporting():  # torch.jit traces
        raise ValueError("attend is exported to ONNX by torch.onnx.export(..., dynamo=True); got dynamo=False")
    if engine not in (None, "reference"):
        raise ValueError(f"an ONNX file has dense attention in plain operations: leave engine=None; got {engine=}")
    if pattern.varies:
        raise ValueError(
            f"an ONNX file takes no run-time tensors: write an AOTInductor package instead; got {pattern!r}"
        )
    if features.drops:
        raise ValueError("an ONNX file is for inference, without dropout: call model.eval(), or write dropout_p=0")
    if any(isinstance(x.shape[2], torch.SymInt) for x in (q, k)):
        if pattern.pads:
            raise ValueError(
                f"an ONNX file with open lengths takes no padding='zeros': export fixed lengths; got {pattern!r}"
            )
        try:
            outside_torch_modes(pattern.check_tokens)(range(LARGEST), range(LARGEST))
        except ValueError as error:
            rule = "an ONNX file with open lengths needs a pattern for any number of tokens: export fixed lengths"
            raise ValueError(f"{rule}; got {pattern!r}: {error}") from None


def _portable_cannot(features: Features) -> str | None:
    if features.score_mod is not None and _is_exporting():
        return "portable with a score_mod is not exported; engine='flex' is (on CPU: inference only, no mixture)"
    return None


@graph_constant  # in a trace, torch 2.11 takes it for True
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


def _aten_cannot(device: torch.device, dtype: torch.dtype, score_mod: ScoreMod | None, drops: bool) -> str | None:
    kind = device_kind(device)
    if not kind.kernels:
        return f"aten runs ATen's kernels on CPU and CUDA; got tensors on {device}. engine='portable' serves them"
    if not kind.on_host and dtype == torch.float64:
        return f"aten has no float64 kernels on {device.type}; engine='portable' serves float64"
    if score_mod is not None:
        serve = "engine='portable' or engine='flex' (on CPU: inference only, and no mixture such as longnet)"
        return f"aten takes no score_mod: write {serve}"
    return "aten runs kernels without attention dropout; engine='portable' serves it" if drops else None


def _flash_cannot(q: Tensor, k: Tensor, v: Tensor, features: Features, sides: tuple[int, ...]) -> str | None:
    if features.drops:
        return "flash runs kernels without attention dropout; engine='flex' serves it"
    reason = flash_cannot(q.device, q.dtype, max(q.shape[-1], v.shape[-1]), sides)
    if reason is not None:
        return reason
    if _score_mod_needs_gradient(features, q):  # torch refuses it even if no gradient is needed
        return "flash takes no score_mod of tensors that require a gradient: detach them, or engine='flex' serves it"
    differentiated = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    # torch removes the backward kernel if the gradient of q is unused.
    if any(differentiated) and not differentiated[0]:
        return "flash has gradients of k and v only if q requires one: call q.requires_grad_(), or write engine='flex'"
    if any(differentiated) and _is_deterministic():
        return "torch.use_deterministic_algorithms is on, and flash has no deterministic backward; engine='flex' has"
    return None


def _score_mod_needs_gradient(features: Features, q: Tensor) -> bool:
    return features.score_mod is not None and any(x.requires_grad for x in tensors_read(features.score_mod, q))


@graph_constant
def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _flex_cannot_compile(device: str) -> str | None:
    """Return why engine "flex" cannot compile for a kind of accelerator, such as "cuda"; None if it can."""
    if device_kind(device).engine != "flex":
        return f"flex runs Triton's kernels, on CUDA and XPU; got tensors on {device}. engine='portable' serves them"
    return None if _has_triton() else f"flex needs Triton, and torch finds none; engine='portable' serves {device}"


@graph_constant
def _has_triton() -> bool:
    return _torch_private.has_triton()


def _flex_cannot_take_head_dim(device: str, head_dim: int) -> str | None:
    if head_dim >= _MIN_FLEX_HEAD_DIM:
        return None
    rule = f"flex needs a head dim of at least {_MIN_FLEX_HEAD_DIM} on {device}"
    return f"{rule}; got {head_dim}. engine='portable' serves it"


def _flex_cannot(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Mixture, features: Features) -> str | None:
    if q.dtype == torch.float64:
        able = (
            "engine='aten' (on CPU) and 'portable' serve" if features.score_mod is None else "engine='portable' serves"
        )
        return f"flex has no float64 kernels; {able} float64"
    if device_kind(q.device).flex_trains:
        device = q.device.type
        return _flex_cannot_compile(device) or _flex_cannot_take_head_dim(device, min(q.shape[-1], v.shape[-1]))
    serves = f"engine={'portable' if features.drops or features.score_mod is not None else 'aten'!r} serves it"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return f"flex has no backward on CPU, and q, k or v requires a gradient; {serves}, or use torch.no_grad()"
    if torch.is_grad_enabled() and _score_mod_needs_gradient(features, q):
        return (
            f"flex has no backward on CPU, and score_mod uses a tensor that requires a gradient; {serves}, "
            "or use torch.no_grad()"
        )
    if features.drops:
        return f"flex gives no lse on CPU, which dropout needs; {serves}"
    if features.return_lse:
        return f"flex gives no lse on CPU; {serves}"
    if features.sinks is not None:
        return f"flex gives no lse on CPU, which sinks need; {serves}"
    if len({branch.text for branch in pattern.branches()}) > 1:
        branches = len(pattern.branches())
        return f"flex gives no lse on CPU, which the {branches} branches of a mixture need; {serves}"
    # Inside torch.compile inductor itself reports a missing compiler.
    missing = None if torch.compiler.is_compiling() else missing_compiler()
    return f"flex on CPU compiles C++, and {missing}; {serves} without a compiler" if missing else None
