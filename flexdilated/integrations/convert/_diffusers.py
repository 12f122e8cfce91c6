"""diffusers' attention: its modules' forward, with `scaled_dot_product_attention` replaced by `attend`.

A module of diffusers leaves attention to its processor, which may join the tokens of a text with those of an image or
video. A pattern counts the tokens of the image or video; those of the text see all tokens and are seen by all.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from ...masks import Mixture, Pattern, every, global_tokens
from ._rule import Candidate, ancestors, original_class
from ._scaled_dot_product import ScaledDotProduct

Order = Literal["text first", "text last", "separate"]

# Where a processor puts the text: before or behind the image's or video's tokens, or in keys and values of its own.
# Those of other models may get a sequence in which both are joined already, whose parts the call does not tell.
_ORDERS: dict[str, Order] = {
    "CogVideoXAttnProcessor2_0": "text first",
    "FluxAttnProcessor": "text first",
    "HunyuanVideoAttnProcessor2_0": "text last",
    "JointAttnProcessor2_0": "text last",
    "LTXVideoAttnProcessor": "separate",
    "SkyReelsV2AttnProcessor": "separate",
    "WanAttnProcessor": "separate",
}
_UNKNOWN = f"which convert does not know; it knows {', '.join(_ORDERS)}"
# A block that joins text and image before it calls its attention, and knows the numbers of both.
_JOINING_BLOCK = "FluxSingleTransformerBlock"


class DiffusersAttention(ScaledDotProduct):
    """Converted attention module of diffusers, or a block that joins text and image before it calls its attention."""

    other_backends = 'write model.set_attention_backend("native"), or '

    def call_pattern(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **options: Any
    ) -> Pattern | Mixture:
        """Return the pattern of a call: the module's, with the call's text tokens where the processor puts them.

        hidden_states: features of the image or video.
        encoder_hidden_states: those of the text; None for self-attention.

        Raises ValueError for an unknown processor, and for cross-attention unless a function chose the pattern.
        """
        given = self._flexdilated
        assert given is not None
        order = _order_of(self)
        if order is None:
            raise ValueError(f"{given.label} has the processor {_processor_name(self)}, {_UNKNOWN}")
        if encoder_hidden_states is None:
            return given.pattern
        if order != "separate":
            return _with_text(given.pattern, hidden_states.shape[1], encoder_hidden_states.shape[1], order)
        if not given.by_name:
            raise ValueError(
                f"{given.label} was called with a text, and a pattern for a whole model is one of self-attention: give "
                "convert a function that returns None for it"
            )
        return given.pattern


def _with_text(pattern: Pattern | Mixture, num_tokens: int, num_text: int, order: Order) -> Pattern | Mixture:
    """Return a pattern over an image's or video's tokens and a text's, whose tokens see all and are seen by all."""
    first = order == "text first"
    tokens = pattern.after(num_text) if first else pattern.before(num_tokens)
    # torch.compile cannot trace the operator ~ of a class.
    text = global_tokens(num_text) if first else every().before(num_tokens).__invert__()
    return tokens + text if isinstance(tokens, Mixture) else tokens | text


def _order_of(module: Any) -> Order | None:
    return _ORDERS.get(_processor_name(module))


def _processor_name(module: Any) -> str:
    return type(getattr(module, "processor", None) or module.attn.processor).__name__


def find(name: str, module: Any, model: nn.Module) -> Candidate | None:
    """Describe a module of diffusers that computes attention by a processor; None for any other module.

    name: name of the module in `model`.

    For unknown processors, `refusal` of the result is the reason.
    """
    kind = original_class(module)
    if not (kind.__module__.startswith("diffusers.") and "Attention" in kind.__name__ and hasattr(module, "processor")):
        return None
    inner = module
    refusal = "" if _order_of(module) else f"its processor is {_processor_name(module)}, {_UNKNOWN}"
    if kind.__name__ == "FluxAttention" and module.added_kv_proj_dim is None:
        inner = next(iter(ancestors(name, model)[-1:]), module)
        if original_class(inner).__name__ != _JOINING_BLOCK:
            refusal = "its tokens are those of a text and an image in one sequence, without their numbers"
    return Candidate(
        name,
        module,
        module.heads,
        inner,
        converted_class=DiffusersAttention,
        refusal=refusal,
        cross_reason="cross-attention to a text" if _is_cross(name, module) else "",
    )


def _is_cross(name: str, module: Any) -> bool:
    cross = getattr(module, "is_cross_attention", None)
    return _order_of(module) == "separate" and (name.rpartition(".")[2] == "attn2" if cross is None else cross)
