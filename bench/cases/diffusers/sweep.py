"""What convert makes of each transformer model of diffusers: equal, refused, or wrong."""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import flexdilated as fd
from bench._dense import counts, dense_attention
from bench.cases._training import Step, gradients_of, loss
from flexdilated import masks
from flexdilated.integrations.convert import _scaled_dot_product
from flexdilated.integrations.convert._convert import candidates_in

from . import GRID, HEADS, MODELS, TOKENS, Inputs, model_of, times_with_text

NEAR = masks.neighborhood(GRID, (1, 1, 1))
PATTERNS = {
    "near": NEAR,
    "per head": masks.per_head([NEAR, masks.strided(16) | masks.chunked(16)]),
    "longnet": masks.longnet((8, 48), (1, 3)) + masks.local_window(left=0, right=0),
}
PROBES = (0, 1, 17, 30, 47)  # tokens of the grid
_WORDS = (0, 3)  # tokens of the text that are no padding


def step(model: nn.Module, name: str) -> Step:
    """Output and gradients of one training step."""
    model.zero_grad()
    out = model(**MODELS[name].inputs())[0]
    loss(out).backward()
    return out.detach(), gradients_of(model)


def distance(got: Step, want: Step) -> float:
    """Largest difference of outputs and of gradients, in parts of the largest output and the largest gradient."""
    if got[1].keys() != want[1].keys() or not all(bool(x.isfinite().all()) for x in (got[0], *got[1].values())):
        return float("inf")
    largest = max(float(x.abs().max()) for x in want[1].values())
    grads = max(float((got[1][name] - x).abs().max()) for name, x in want[1].items()) / largest
    return max(grads, float((got[0] - want[0]).abs().max() / want[0].abs().max()))


@contextmanager
def dense_within(model: nn.Module, replaced: list[str], times: Tensor, text: str) -> Iterator[list[int]]:
    """Lets the modules of these names attend by dense counts, as `dense_attention` does."""
    inside = []
    modules = [model.get_submodule(name) for name in replaced]
    hooks = [module.register_forward_pre_hook(lambda *_: inside.append(1)) for module in modules]
    hooks += [module.register_forward_hook(lambda *_: inside.clear()) for module in modules]
    try:
        with dense_attention(lambda *lengths: times_with_text(times, text, *lengths) if inside else None) as calls:
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def misplaced(model: nn.Module, name: str) -> list[str]:
    """Return where a converted model's queries are not those of the tokens that the pattern takes them for.

    A change of a token of the input changes the query of that token most, in each layer.
    """
    own, found = MODELS[name], []
    inputs = own.inputs()
    before = queries(model, inputs)
    for token in PROBES:
        changed = inputs | {"hidden_states": with_changed_token(inputs["hidden_states"], token, own.axes)}
        for call, (query, was) in enumerate(zip(queries(model, changed), before, strict=True)):
            place = token + (len(query) - TOKENS if own.text == "first" else 0)
            if (seen := _most_changed(query, was)) != place:
                found.append(f"call {call}: token {token} of the grid is query {seen}, not {place}")
    for word in _WORDS if own.text else ():
        text = inputs["encoder_hidden_states"].clone()
        text[:, word] += torch.linspace(-3, 3, text.shape[-1])
        changed = inputs | {"encoder_hidden_states": text}
        for call, (query, was) in enumerate(zip(queries(model, changed), before, strict=True)):
            num_text = len(query) - TOKENS
            seen = _most_changed(query, was)
            # Behind the first attention, a text may change the tokens of the grid more than its own.
            first, last = seen < num_text, seen >= (num_text if call else TOKENS)
            if num_text and not (first if own.text == "first" else last):
                found.append(f"call {call}: token {word} of the text is query {seen} of {len(query)}")
    return found


def queries(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Queries (N, H * D) of the first batch entry, of each call of `attend` by a converted model."""
    seen = []

    def recorded(query: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append(query[0].transpose(0, 1).flatten(1).detach())
        return fd.attend(query, *args, **options)

    with torch.no_grad(), patch.object(_scaled_dot_product, "attend", recorded):
        model(**inputs)
    return seen


def _most_changed(query: Tensor, was: Tensor) -> int:
    return int((query - was).abs().sum(1).argmax())


def with_changed_token(hidden_states: Tensor, token: int, axes: list[str]) -> Tensor:
    """Change all that a token of the grid is made of; tokens are counted row by row, frame after frame."""
    changed = hidden_states.clone()
    if "N" in axes:
        changed[:, token] += torch.linspace(-3, 3, changed.shape[-1])
        return changed
    order = "B F H W C" if "F" in axes else "B H W C"
    view = changed.permute([axes.index(each) for each in order.split()])
    rows, columns = (view.shape[order.split().index(axis)] // 2 for axis in ("H", "W"))
    frame, place = divmod(token, rows * columns)
    row, column = divmod(place, columns)
    part = view[:, frame] if "F" in axes else view
    part[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += torch.linspace(-3, 3, view.shape[-1])
    return changed


def examine(name: str, patterns: tuple[str, ...] = tuple(PATTERNS)) -> dict[str, Any]:
    """Outcome of a model of `MODELS`: what was replaced, and how far results are from those of dense attention.

    patterns: names in PATTERNS.

    Raises AssertionError for a model whose conversion is not undone, changes nothing, or misplaces tokens.
    """
    model, own = model_of(name), MODELS[name]
    dense = step(model, name)
    report = fd.convert(model, masks.every())
    assert len(report.replaced) == own.replaced, report
    assert {each.num_heads for each in report.replaced} == {HEADS}, report
    far = {"every": distance(step(model, name), dense)}
    assert (wrong := misplaced(model, name)) == [], wrong
    replaced = [each.name for each in report.replaced]
    for pattern in patterns:
        fd.convert(model, None)
        with dense_within(model, replaced, counts(PATTERNS[pattern], TOKENS, num_heads=HEADS), own.text) as calls:
            want = step(model, name)
        assert calls[0] >= own.replaced
        fd.convert(model, PATTERNS[pattern])
        got = step(model, name)
        with torch.no_grad():
            inferred = model.eval()(**own.inputs())[0]
        far[pattern] = max(distance(got, want), distance((inferred, got[1]), got))
        model.train()
        assert distance(got, dense) > 1e-3, f"{pattern} changes nothing"
    fd.convert(model, None)
    assert distance(step(model, name), dense) == 0, "undone is not what it was"
    processors = {type(model.get_submodule(each).processor).__name__ for each in replaced}
    return {
        "class": own.name,
        "processors": sorted(processors),
        "text": own.text,
        "replaced": len(replaced),
        "left": {each.name: each.reason for each in report.left},
        "far": far,
    }


# Classes that no model of MODELS has and that do not build without arguments.
_SIZES: dict[str, dict[str, Any]] = {
    "DreamLiteTransformer2DModel": {"in_channels": 32},
    "HiDreamImageTransformer2DModel": {"patch_size": 2, "caption_channels": (8, 8), "llama_layers": (0, 1)},
    "LatteTransformer3DModel": {"in_channels": 4, "patch_size": 2, "caption_channels": 8},
    "OmniGenTransformer2DModel": {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}},
    "Transformer2DModel": {"in_channels": 32},
    "TransformerTemporalModel": {"in_channels": 32},
}


def other_classes() -> dict[str, type[nn.Module]]:
    """Transformer models of diffusers that no model of MODELS is of, by name."""
    transformers = importlib.import_module("diffusers.models.transformers")
    base = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    found = {}
    for info in pkgutil.iter_modules(transformers.__path__):
        module = importlib.import_module(f"{transformers.__name__}.{info.name}")
        for name, each in vars(module).items():
            if isinstance(each, type) and issubclass(each, base) and each.__module__ == module.__name__:
                found[name] = each
    return {name: found[name] for name in sorted(found.keys() - {model.name for model in MODELS.values()})}


def refused(kind: type[nn.Module]) -> list[str]:
    """Return the reasons why convert refuses a class, built at its full size without storage.

    Raises AssertionError if it converts one of its modules.
    """
    with torch.device("meta"):
        model = kind(**_SIZES.get(kind.__name__, {}))
    try:
        report = fd.convert(model, masks.every())
    except ValueError as error:
        if "has no attention module that convert can replace" not in str(error):
            raise
    else:
        raise AssertionError(report)
    return list(dict.fromkeys(each.refusal or each.cross_reason for each in candidates_in(model)))
