"""Models, and parts of models, that this library cannot serve; they are recognized by the source code of modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import getsource, signature, unwrap
from textwrap import dedent
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_MASK, _MERGED = "attention_mask", {"merged_attention_mask"}
_OWN_ATTENTION = {"longformer": "longformer(radius, num_global)", "big_bird": "bigbird(num_tokens)"}
# Classes that make masks: of the images of a batch, packed in one sequence; of a window that depends on the prompt.
_MAKE_MASKS = {"PixtralVisionModel", "UnlimitedOcrTextModel"}
# Keyword arguments that layers may hand to attention functions: `attention` computes them, or they change no result.
_KNOWN = {"attention_mask", "scaling", "dropout", "is_causal", "softcap", "s_aux", "position_bias", "indices"}
_KNOWN |= {"block_indices", "query", "key", "value", "position_ids", "output_attentions", "sliding_window"}
_KNOWN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic"}
_KNOWN |= {"sinks"}  # refused below, with its own reason
KEEP = "attn_implementation='sdpa' or 'eager'"


def unserved_parts(model: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[str, str]:
    """Return {path: reason} of the parts of a model whose attention, by its source code, this library cannot compute.

    Such a part is a model with a config of its own that is not the config of the text, such as a vision tower: it can
    keep the attention of transformers.

    layers: the model's modules that use transformers' registry of attention functions.

    Raises ValueError, with the remedy, if a module outside of such parts cannot be served, or if no layer can.
    """
    name = type(model).__name__
    if not layers:
        raise ValueError(
            f"{name} has no layer that asks transformers' registry of attention functions for its own. "
            f"{_own_attention_advice(model)}"
        )
    paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
    found: dict[str, str] = {}
    for module, reason in _unserved_modules(paths, layers):
        part = _own_part(model, paths[module])
        found.setdefault(part, reason)
        if all(any(_contains(part, paths[layer]) for part in found) for layer in layers):
            raise ValueError(f"{name} cannot be served: {reason}; {KEEP} serves it")
    return found


def _unserved_modules(paths: Mapping[nn.Module, str], layers: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    for number, layer in enumerate(layers):
        if reason := _why_unserved(type(layer)):
            yield layer, f"layer {number}, {type(layer).__name__}, {reason}"
    own = set(layers)
    indexers = {indexer for layer in layers if _hands_over_indices(type(layer)) for indexer in layer.modules()}
    for module, path in paths.items():
        if module not in own | indexers and _reads_masks(type(module)):
            what = f"{path}, {type(module).__name__}," if path else "it"
            yield module, f"{what} computes with a mask of queries and keys, which flexdilated does not make"


def _own_part(model: PreTrainedModel, path: str) -> str:
    """Return the path of the smallest submodel that contains the module at `path` and has a config of its own.

    A config is its own if no model outside the submodel has it, and if it is not the config of the model's text. The
    result is "", the whole model, if there is no such submodel.
    """
    models = {name: each for name, each in model.named_modules() if isinstance(each, PreTrainedModel)}
    text = model.config.get_text_config(decoder=True)
    around = sorted((name for name in models if name and _contains(name, path)), key=len, reverse=True)
    for name in around:
        config = models[name].config
        shared = any(each.config is config for other, each in models.items() if not _contains(name, other))
        if not shared and config is not text:
            return name
    return ""


def _contains(part: str, path: str) -> bool:
    return not part or f"{path}.".startswith(f"{part}.")


def _own_attention_advice(model: nn.Module) -> str:
    recipe = next((made for key, made in _OWN_ATTENTION.items() if key in type(model).__module__), None)
    if recipe is None:
        return f"Its attention is its own code: {KEEP} keeps it, or call flexdilated.attend in it"
    return (
        f"Its sparse attention is its own code. flexdilated.masks.recipes.{recipe} makes its pattern for any "
        "model that set_pattern takes, such as a BertModel or RobertaModel"
    )


class _WithoutEagerAndSdpa(ast.NodeTransformer):
    """Replaces `if self.config._attn_implementation in ("eager", "sdpa")` by the code of its else branch."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        match node.test:
            case ast.Compare(ast.Attribute(attr="_attn_implementation"), [ast.In()], [ast.Tuple(elts=names)]):
                if {getattr(name, "value", None) for name in names} <= {"eager", "sdpa"}:
                    return node.orelse
        return node


def _forward_nodes(kind: type[nn.Module]) -> Iterator[ast.AST]:
    return ast.walk(_WithoutEagerAndSdpa().visit(ast.parse(dedent(getsource(unwrap(kind.forward))))))


@cache
def _hands_over_indices(kind: type[nn.Module]) -> bool:
    """True if attention layers of this class call an indexer, and hand over the keys or blocks that it chose."""
    given = {node.arg for node in _forward_nodes(kind) if isinstance(node, ast.keyword)}
    return bool(given & {"indices", "block_indices"}) and any(map(_is_indexer_call, _forward_nodes(kind)))


def _is_indexer_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "indexer"


@cache
def _why_unserved(kind: type[nn.Module]) -> str | None:
    """Return why a class of attention layers, by the source of its forward, cannot be supported; None for no reason."""
    arguments = set(signature(unwrap(kind.forward)).parameters)
    nodes, of_indexer = [*_forward_nodes(kind)], set[ast.AST]()
    if _hands_over_indices(kind):  # it takes a dense mask of all pairs
        of_indexer = {each for node in nodes if _is_indexer_call(node) for each in ast.walk(node)}
    for node in nodes:
        if node in of_indexer:
            continue
        match node:
            case ast.keyword(arg="sinks"):
                return "gives each query a sink logit of its own"
            case ast.Call(func=ast.Name(id=name)) if "attention" in name:
                unknown = sorted({each.arg for each in node.keywords if each.arg} - _KNOWN)
                if name == "attention_interface" and unknown:
                    return f"hands {unknown[0]} to attention functions, which flexdilated does not know"
                masks = [each.value for each in node.keywords if each.arg == _MASK] + node.args[4:5]
            case ast.Assign(targets=[ast.Name(id="attention_mask")]):
                masks = [node.value]
            case ast.Subscript(value=ast.Name(id="attention_mask")):
                masks = [node]
            case _:
                continue
        if not all(_is_unchanged(each, arguments) for each in masks):
            return "makes or changes the mask of queries and keys itself"
    return None


def _is_unchanged(mask: ast.expr, arguments: set[str]) -> bool:
    """True if a mask expression in `forward` is an argument of `forward`, a constant, or a conditional choice of these.

    arguments: names of the arguments of `forward`.

    Arguments whose names are in `_MERGED`, masks that the model has computed from other masks, give False.
    """
    if isinstance(mask, ast.IfExp):
        return _is_unchanged(mask.body, arguments) and _is_unchanged(mask.orelse, arguments)
    return isinstance(mask, ast.Constant) or (isinstance(mask, ast.Name) and mask.id in arguments - _MERGED)


@cache
def _reads_masks(kind: type[nn.Module]) -> bool:
    """True if modules of this class are taken to compute with the values of the attention mask.

    These are the classes in `_MAKE_MASKS`, which build a mask, and classes, except PreTrainedModels, whose `forward`
    takes attention_mask and computes a softmax or reads the mask's dtype.

    kind: a class that does not use the registry of attention functions.
    """
    forward = unwrap(kind.forward)
    if kind.__name__ in _MAKE_MASKS:
        return True
    if _MASK not in signature(forward).parameters or issubclass(kind, PreTrainedModel):
        return False
    return "softmax" in forward.__code__.co_names or any(
        isinstance(node, ast.Attribute) and node.attr == "dtype" and _is_mask(node.value)
        for node in _forward_nodes(kind)
    )


def _is_mask(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == _MASK
