"""`convert`: replace the attention of a model's modules by attention with patterns, and report what was replaced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from ...masks import Mixture, Pattern
from ...masks.core import advises, instead_of_pattern
from ...masks.patterns import names
from . import _diffusers, _timm, _torch, _x_transformers
from ._rule import (
    Candidate,
    Converted,
    GivenPattern,
    Replaced,
    Report,
    Unconverted,
    check_restorable,
    original_class,
    replace_class,
    restore_class,
)

AnyPattern = Pattern | Mixture
PatternChooser = Callable[[str, nn.Module], AnyPattern | None]

_CONVERTIBLE = (
    "nn.MultiheadAttention (in nn.TransformerEncoder, nn.Transformer, torchvision's ViT), attention of timm's ViTs and "
    "EVA, Attention of x-transformers, attention of diffusers with a processor"
)
_ATTENTION = re.compile("Attention|Attn")  # in the names of classes


@advises(how="write fd.convert(model, pattern)")
def convert(model: nn.Module, pattern: AnyPattern | PatternChooser | None) -> Report:
    """Replace the attention of a model's modules by attention with a pattern, in place; None restores the original.

    model: any module that contains or is `nn.MultiheadAttention`, or attention of timm, x-transformers or diffusers.
        Parameters, buffers, names in the `state_dict`, hooks and references are preserved; deepcopy, pickle and
        torch.compile work. A call's causal mask or flag and key padding restrict the pattern further; caches and
        memories are supported. In joint attention of diffusers the pattern's positions are those of the image's or
        video's tokens; text tokens see all tokens and are seen by all.
    pattern: a pattern for all self-attention modules; or a function that gets (name, module) from
        `model.named_modules()` and returns the module's pattern, or None for its original attention; or None, which
        restores the original attention of all modules.

    Each call replaces earlier ones: modules not converted again get their original attention. Modules known to be
    cross-attention, as in decoder layers, are converted only if a function returns a pattern for them.

    Returns a `Report`, which prints as tables: `replaced` lists the converted modules with their patterns, `left` the
    attention modules that keep their original attention, with the reasons.

    Raises TypeError for arguments, and results of the function, of other types. Raises ValueError, before any change,
    for a model without a module that the pattern may replace, a pattern that does not fit a module's heads or has
    run-time tensors, and a converted module whose class was replaced later, as by `fully_shard`. Calls of the model
    raise ValueError for need_weights=True, for masks that are neither causal nor padding, and for numbers of queries
    and keys that do not fit the pattern; in a compiled graph, such masks may raise RuntimeError.

    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    >>> print(fd.convert(model.eval(), masks.local_window(left=31, right=31)))
    replaced            kind                      heads    pattern
    ------------------  ------------------------  -------  -------------------------------
    layers.0.self_attn  torch.MultiheadAttention  4        local_window(left=31, right=31)
    layers.1.self_attn  torch.MultiheadAttention  4        local_window(left=31, right=31)
    >>> model(torch.randn(1, 256, 64)).shape
    torch.Size([1, 256, 64])
    >>> print(fd.convert(model, None).replaced)
    ()

    A timm ViT with a class token and 14 x 14 patches:

    >>> vit = masks.neighborhood((14, 14), 2).after(1) | masks.global_tokens(1)
    >>> fd.convert(model, vit)  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes (model, pattern), where model is a torch.nn.Module; got {type(model).__name__}")
    if not (pattern is None or isinstance(pattern, AnyPattern) or callable(pattern)):
        raise TypeError(
            f"pattern must be a pattern, a function (name, module) -> pattern or None, or None; got {pattern!r:.80}"
            f"{instead_of_pattern(pattern)}"
        )
    found = candidates_in(model)
    chosen = [_pattern_or_reason(each, pattern) for each in found]
    by_name = not isinstance(pattern, AnyPattern)
    if pattern is not None and not any(not each.refusal and (by_name or not each.cross_reason) for each in found):
        _refuse(model, found)
    for name, module in model.named_modules():
        check_restorable(name, module)
    for module in model.modules():
        restore_class(module)
    replaced, left = [], []
    for each, own in zip(found, chosen, strict=True):
        if isinstance(own, str):
            left.append(Unconverted(each.name, each.kind, own))
            continue
        _replace(each, GivenPattern(each.name, own, by_name))
        replaced.append(Replaced(each.name, each.kind, each.num_heads, own))
    return Report(tuple(replaced), tuple(left))


def candidates_in(model: nn.Module) -> list[Candidate]:
    """Return a `Candidate` for each attention module of a model, in the order of `model.named_modules()`.

    An attention module is one that a library's `candidate_of` describes, or an unknown one, which cannot be converted:
    a module of another class with Attention or Attn in the class name. An unknown module is left out if it contains an
    attention module, or if a module that `candidate_of` describes contains it.
    """
    found: dict[str, Candidate] = {}
    named: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        each = (
            _torch.candidate_of(name, module, model)
            or _timm.candidate_of(name, module)
            or _x_transformers.candidate_of(name, module, model)
            or _diffusers.candidate_of(name, module, model)
        )
        if each is not None:
            found[name] = each
        elif _ATTENTION.search(original_class(module).__name__) and not any(_contains(outer, name) for outer in found):
            named[name] = module
    for name, module in named.items():
        if not any(_contains(name, inner) for inner in (*found, *named)):
            found[name] = Candidate(name, module, refusal=_reason_for_unknown(module))
    return [found[name] for name, _ in model.named_modules() if name in found]


def _contains(outer: str, inner: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _reason_for_unknown(module: nn.Module) -> str:
    match type(module).__module__.partition(".")[0]:
        case "flexdilated":
            return "it attends by a pattern already"
        case "transformers":
            return "flexdilated.integrations.transformers.set_pattern gives models of transformers patterns"
    return "its class is not known to convert: call flexdilated.attend in its forward"


def _pattern_or_reason(each: Candidate, pattern: AnyPattern | PatternChooser | None) -> AnyPattern | str:
    """Return the validated pattern for a module, or a text: the reason why it keeps its original attention.

    pattern: the argument of `convert`.

    Raises TypeError or ValueError for a pattern that does not fit the module.
    """
    if each.refusal:
        return each.refusal
    if pattern is None:
        return "it has its own attention back"
    if each.cross_reason and isinstance(pattern, AnyPattern):
        return f"{each.cross_reason}; a function of its name may choose a pattern"
    own = pattern if isinstance(pattern, AnyPattern) else pattern(each.name, each.module)
    if own is None:
        return "the function chose None"
    _check_pattern(each, own)
    return own


def _check_pattern(each: Candidate, own: Any) -> None:
    if not isinstance(own, AnyPattern):
        raise TypeError(f"the function must return a pattern or None; for {each.name!r} it returned {own!r}")
    if names(own):
        raise ValueError(
            f"a module's pattern has no run-time tensors, as padding comes with its calls; {each.name!r} got {own!r}"
        )
    try:
        own.check_heads(each.num_heads)
    except ValueError as error:
        raise ValueError(f"{each.name!r} has {each.num_heads} heads: {error}") from error


def _replace(each: Candidate, given: GivenPattern) -> None:
    assert each.inner is not None
    replace_class(each.inner, each.converted_class, given)
    for module, converted_class in each.enclosing:
        if not isinstance(module, Converted):  # converted already for another layer of an encoder
            replace_class(module, converted_class)


def _refuse(model: nn.Module, found: list[Candidate]) -> NoReturn:
    first = {(each.kind, each.refusal or each.cross_reason): each.name for each in reversed(found)}
    seen = "".join(f"; {name or 'the model'} ({kind}): {reason}" for (kind, reason), name in first.items())
    raise ValueError(
        f"{type(model).__name__} has no attention module that convert can replace. It looks for {_CONVERTIBLE}{seen}"
    )
