"""Patterns of a model's attention layers: set on its modules, and written into its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import unwrap
from typing import Any
from warnings import warn

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...masks import Mixture, Pattern, from_json, to_json
from ...masks.core import advises, require_choice
from ...masks.patterns import names
from ...selection import SelectedAttention

LayerPattern = Pattern | Mixture | SelectedAttention
Patterns = LayerPattern | Mapping[int, LayerPattern | None] | Callable[[nn.Module], LayerPattern | None]

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_PATTERNS_KEY = "flexdilated_patterns"  # key of a config
_IMPLEMENTATION = "attn_implementation"  # key in the file of a config
_USED_IMPLEMENTATION = "_attn_implementation"  # attribute of a config
_LAYER_PATTERN = "_flexdilated_pattern"  # attribute of a layer: (pattern, replaces)
_WARNS = "_flexdilated_warns_of_adapters"  # attribute of a model with the hook `_warn_of_adapters`
_COMPOSE = ("and", "replace")


@advises()
def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that use transformers' registry of attention functions, in the order of `model.modules()`."""
    return [module for module in model.modules() if _REGISTRY in unwrap(type(module).forward).__code__.co_names]


def layer_pattern(layer: nn.Module) -> tuple[LayerPattern | None, bool]:
    """Return (pattern, replaces) as `set_pattern` stored them on a layer; (None, False) if it stored nothing.

    pattern: None for a layer that keeps the model's rule.
    replaces: True for compose="replace", where a pattern is used without the model's rule; no effect if the pattern is
        None.

    Raises ValueError if a loaded config has patterns that were not yet set on the layers.
    """
    own = getattr(layer, _LAYER_PATTERN, None)
    if own is not None:
        return own
    if getattr(getattr(layer, "config", None), _PATTERNS_KEY, None) is not None:
        raise ValueError(
            "the model's config holds patterns which its layers do not have yet: call "
            "flexdilated.integrations.transformers.set_pattern(model) once it is loaded"
        )
    return None, False


def choose_patterns(
    model: nn.Module, pattern: Patterns | None, compose: str, unserved: Mapping[str, str]
) -> tuple[list[nn.Module], list[Any], str]:
    """Validate the arguments of `set_pattern`; return (attention layers, a pattern or None for each, compose).

    pattern, compose: as in `set_pattern`; if `pattern` is None, both come from the model's config.
    unserved: {path: reason} from `unserved_parts`; the layers of these parts get None.

    Raises ValueError or TypeError for arguments that `set_pattern` does not take, and ValueError for a mapping that has
    a pattern for a layer of a part in `unserved`.
    """
    layers = attention_layers(model)
    kept = {layer: reason for path, reason in unserved.items() for layer in attention_layers(model.get_submodule(path))}
    if pattern is None:
        chosen, compose = _stored_patterns(model, len(layers))
    elif isinstance(pattern, Mapping):
        strangers = [number for number in pattern if number not in range(len(layers))]
        if strangers:
            raise ValueError(f"layers are numbered from 0 to {len(layers) - 1}; got {strangers[0]!r}")
        chosen = [pattern.get(number) for number in range(len(layers))]
        for number, (layer, own) in enumerate(zip(layers, chosen, strict=True)):
            if own is not None and layer in kept:
                raise ValueError(
                    f"layer {number} keeps the attention of transformers, so it takes no pattern: {kept[layer]}"
                )
    elif isinstance(pattern, Pattern | Mixture | SelectedAttention):  # a module is callable too
        chosen = [pattern] * len(layers)
    elif callable(pattern):
        chosen = [pattern(layer) for layer in layers]
    else:
        raise TypeError(
            "pattern must be a pattern, a mapping from a layer's number to one, or a function of a layer's module; "
            f"got {pattern!r}"
        )
    chosen = [None if layer in kept else own for layer, own in zip(layers, chosen, strict=True)]
    for number, (layer, own) in enumerate(zip(layers, chosen, strict=True)):
        if own is not None:
            _check_pattern(number, layer, own)
    return layers, chosen, require_choice("compose", compose, _COMPOSE)


def set_implementation(model: PreTrainedModel, name: str, unserved: Mapping[str, str]) -> None:
    """Set the attention implementation `name` on a model, but not on its parts in `unserved`; warn of each such part.

    unserved: {path: reason} from `unserved_parts`.

    A part in `unserved` keeps its implementation; if this is `name` already, from a saved config, the part gets the
    default of transformers.
    """
    parts: dict[str, Any] = {path: model.get_submodule(path) for path in unserved}
    before = {path: getattr(part.config, _USED_IMPLEMENTATION) for path, part in parts.items()}
    model.set_attn_implementation(name)
    for path, part in parts.items():
        own = before[path] if before[path] != name else part.get_correct_attn_implementation(None)
        part.set_attn_implementation(own)
        warn(
            f"{path} keeps the attention of transformers, and only the other layers get patterns: {unserved[path]}",
            stacklevel=4,
        )


def store_patterns(model: PreTrainedModel, layers: list[nn.Module], chosen: list[Any], compose: str, name: str) -> None:
    """Set the chosen patterns on layers, and write them and the implementation's name into configs.

    The configs are the model's and those of the layers that use the implementation.

    chosen: a pattern or None for each layer.
    compose, name: as in `set_pattern`; the name is written as `attn_implementation`.

    If all patterns are None, the configs' entries are removed instead. The hook `_warn_of_adapters` is added once.
    """
    for layer, own in zip(layers, chosen, strict=True):
        setattr(layer, _LAYER_PATTERN, (own, compose == "replace"))
    patterns = [None if own is None else _json_or_repr(own) for own in chosen]
    # transformers raises for an implementation's name that is not registered, so a process without this library cannot
    # load the model with dense attention by mistake.
    written = {_PATTERNS_KEY: {"compose": compose, "name": name, "patterns": patterns}, _IMPLEMENTATION: name}
    configs: list[Any] = [layer.config for layer in layers]
    served = [config for config in configs if getattr(config, _USED_IMPLEMENTATION) == name]
    for config in {id(each): each for each in (model.config, *served)}.values():
        for key, value in written.items():
            if any(own is not None for own in chosen):
                setattr(config, key, value)
            else:
                vars(config).pop(key, None)
    if not getattr(model, _WARNS, False):
        model.register_state_dict_pre_hook(_warn_of_adapters)
        setattr(model, _WARNS, True)


def patch_config_to_dict() -> None:
    """Patch `PreTrainedConfig.to_dict` to write the implementation's name with every config that has patterns."""
    # transformers removes the name from a config on reading. Without the patch, a model that is loaded and saved before
    # `set_pattern` would be loaded with dense attention next time.
    plain = PreTrainedConfig.to_dict
    if hasattr(plain, _PATTERNS_KEY):
        return

    @wraps(plain)
    def to_dict(self: PreTrainedConfig) -> dict[str, Any]:
        written = plain(self)
        if isinstance(stored := written.get(_PATTERNS_KEY), dict):
            written.setdefault(_IMPLEMENTATION, stored.get("name", "flexdilated"))
        return written

    setattr(to_dict, _PATTERNS_KEY, True)
    PreTrainedConfig.to_dict = to_dict


def _warn_of_adapters(model: nn.Module, prefix: str, _: bool) -> None:
    """Hook of `state_dict` that warns, if a model has adapters and patterns, that PEFT does not save the patterns."""
    adapted = ".base_model." in f".{prefix}" or getattr(model, "_hf_peft_config_loaded", False)
    if adapted and hasattr(model.config, _PATTERNS_KEY):
        warn(
            "saved adapters do not contain the patterns of their base model, and load without them: save the base "
            "model too, or call flexdilated.integrations.transformers.set_pattern with the patterns once it is loaded",
            stacklevel=2,
        )


def _check_pattern(number: int, layer: nn.Module, pattern: Any) -> None:
    if isinstance(pattern, SelectedAttention):
        if pattern.over_ranks is not None:
            raise ValueError(
                "a model of transformers has all tokens on one rank: give its layers a SelectedAttention without a "
                f"mesh; layer {number} got one with {pattern.over_ranks.mesh_text}"
            )
        return
    if not isinstance(pattern, Pattern | Mixture):
        raise TypeError(f"layer {number} must get a pattern or None; got {pattern!r}")
    if names(pattern):
        raise ValueError(
            f"a layer's pattern has no run-time tensors, as padding and packing come from the model's inputs; layer "
            f"{number} got {pattern!r}"
        )
    num_heads = getattr(getattr(layer, "config", None), "num_attention_heads", None)
    if isinstance(num_heads, int):
        try:
            pattern.check_heads(num_heads)
        except ValueError as error:
            raise ValueError(f"layer {number} has {num_heads} heads: {error}") from error


def _json_or_repr(pattern: LayerPattern) -> str:
    """Return a pattern as JSON, or its repr if it has no JSON, as with custom functions and selections."""
    if isinstance(pattern, SelectedAttention):
        return repr(pattern)
    try:
        return to_json(pattern)
    except TypeError:
        return repr(pattern)


def _stored_patterns(model: Any, num_layers: int) -> tuple[list[Any], str]:
    """Return ([pattern or None for each layer], compose) from a model's config, where `store_patterns` wrote them.

    Raises ValueError if the config has no patterns, if their number is not num_layers, or if one is not JSON.
    """
    stored = getattr(model.config, _PATTERNS_KEY, None)
    if stored is None:
        raise ValueError("the model's config holds no patterns: give one, set_pattern(model, pattern)")
    texts = stored["patterns"]
    if len(texts) != num_layers:
        raise ValueError(f"the model's config holds patterns of {len(texts)} layers; it has {num_layers}")
    try:
        return [None if text is None else from_json(text) for text in texts], stored["compose"]
    except ValueError as error:
        raise ValueError(f"the model's config has a pattern without JSON: give it to set_pattern ({error})") from error
