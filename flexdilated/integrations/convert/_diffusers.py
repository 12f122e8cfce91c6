"""diffusers' attention: its modules' forward, with `scaled_dot_product_attention` replaced by `attend`.

A module of diffusers leaves attention to its processor, which may join the tokens of a text with those of an image or
video. A pattern's positions are those of the image's or video's tokens; text tokens see all and are seen by all.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from ...masks import Mixture, Pattern, every, global_tokens
from ._rule import Candidate, ancestors, original_class
from ._scaled_dot_product import ScaledDotProduct

Order = Literal["text first", "text last", "separate"]

# Where a processor puts the text: before or behind the image's or video's tokens, or in keys and values of its own. A
# processor is listed if its model was run; those of other models may get a sequence in which both are joined already,
# whose parts the call does not tell.
_ORDERS: dict[str, Order] = {
    "AllegroAttnProcessor2_0": "separate",
    "AnyFlowAttnProcessor": "separate",
    "AttnProcessor2_0": "separate",
    "AuraFlowAttnProcessor2_0": "text first",
    "BriaAttnProcessor": "text first",
    "BriaFiboAttnProcessor": "text first",
    "CogVideoXAttnProcessor2_0": "text first",
    "CogView4AttnProcessor": "text first",
    "CosmosAttnProcessor2_0": "separate",
    "EasyAnimateAttnProcessor2_0": "text first",
    "Flux2AttnProcessor": "text first",
    "FluxAttnProcessor": "text first",
    "GlmImageAttnProcessor": "text first",
    "HunyuanAttnProcessor2_0": "separate",
    "HunyuanImageAttnProcessor": "text last",
    "HunyuanVideo15AttnProcessor2_0": "text last",
    "HunyuanVideoAttnProcessor2_0": "text last",
    "JointAttnProcessor2_0": "text last",
    "JoyImageAttnProcessor": "text last",
    "Kandinsky5AttnProcessor": "separate",
    "LTX2AudioVideoAttnProcessor": "separate",
    "LTXVideoAttnProcessor": "separate",
    "LongCatImageAttnProcessor": "text first",
    "LuminaAttnProcessor2_0": "separate",
    "MochiAttnProcessor2_0": "text last",
    "MotifVideoAttnProcessor2_0": "text last",
    "OvisImageAttnProcessor": "text first",
    "QwenDoubleStreamAttnProcessor2_0": "text first",
    "SkyReelsV2AttnProcessor": "separate",
    "WanAttnProcessor": "separate",
}
_UNKNOWN = "which convert does not know: the page on models of diffusers lists those that it knows"
_IN_ONE_SEQUENCE = "its tokens are those of a text and an image in one sequence, without their numbers"
_LINEAR = "which computes linear attention: it has no softmax over pairs of tokens"
_UNSUPPORTED = {
    **dict.fromkeys(("SanaLinearAttnProcessor2_0", "SanaLinearAttnProcessor3_0"), _LINEAR),
    **dict.fromkeys(
        (
            "ErnieImageSingleStreamAttnProcessor",
            "Flux2ParallelSelfAttnProcessor",
            "Lumina2AttnProcessor2_0",
            "OmniGenAttnProcessor2_0",
            "ZSingleStreamAttnProcessor",
        ),
        f"which convert does not know: {_IN_ONE_SEQUENCE}",
    ),
}
_REMEDY = "write a processor that calls flexdilated.attend"
# A processor of many models, and the model whose tokens are known.
_ONLY_IN = {"AttnProcessor2_0": "PixArtTransformer2DModel"}
# These get text and image in one sequence, where their attention has no projections of its own for a text.
_JOINED = (
    "AuraFlowAttnProcessor2_0",
    "BriaAttnProcessor",
    "BriaFiboAttnProcessor",
    "Flux2AttnProcessor",
    "FluxAttnProcessor",
    "LongCatImageAttnProcessor",
    "OvisImageAttnProcessor",
)
# Blocks that join text and image before they call that attention, and know the numbers of both.
_JOINING_BLOCKS = (
    "BriaSingleTransformerBlock",
    "FluxSingleTransformerBlock",
    "LongCatImageSingleTransformerBlock",
    "OvisImageSingleTransformerBlock",
)
# Modules whose attention has a known processor, and other tokens than those of the image or video.
_OTHER_TOKENS = {
    "HunyuanVideoFramepackTransformer3DModel": "its tokens are those of past frames and a video in one sequence",
    **dict.fromkeys(
        ("Kandinsky5TransformerEncoderBlock", "LTX2ConnectorTransformer1d"), "its tokens are those of a text"
    ),
}
# Names of self-attention among the tokens of the image or video, where a text has keys and values of its own.
_SELF_ATTENTION = ("", "attn1", "self_attention")


class DiffusersAttention(ScaledDotProduct):
    """Converted attention module of diffusers, or a block that joins text and image before it calls its attention."""

    other_backends = 'write model.set_attention_backend("native"), or '

    def call_pattern(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **options: Any
    ) -> Pattern | Mixture:
        """Return the pattern over all tokens of a call.

        It is the module's pattern, extended to the text's tokens if the processor joins them with the image's or
        video's in one sequence.

        hidden_states: features of the image or video.
        encoder_hidden_states: features of the text; None for self-attention.

        Raises ValueError for an unknown processor, for a joint sequence with fewer image tokens than the pattern's
        grid, and for cross-attention unless a function chose the pattern.
        """
        given = self._flexdilated
        assert given is not None
        order = _order_of(self)
        if order is None:
            raise ValueError(f"{given.label} has the processor {_unsupported(self)}")
        if encoder_hidden_states is None or encoder_hidden_states is hidden_states:
            return given.pattern
        if order != "separate":
            given.check_grid(hidden_states.shape[1])
            return _with_text(given.pattern, hidden_states.shape[1], encoder_hidden_states.shape[1], order)
        if not given.by_name:
            raise ValueError(
                f"{given.label} was called with a text, and a pattern for a whole model is one of self-attention: give "
                "convert a function that returns None for it"
            )
        return given.pattern


def _with_text(pattern: Pattern | Mixture, num_tokens: int, num_text: int, order: Order) -> Pattern | Mixture:
    """Return `pattern`, of an image or video, extended to a text whose tokens see all tokens and are seen by all.

    num_tokens, num_text: numbers of tokens of the image or video, and of the text.
    """
    first = order == "text first"
    tokens = pattern.after(num_text) if first else pattern.before(num_tokens)
    # torch.compile cannot trace the operator ~ of a class.
    text = global_tokens(num_text) if first else every().before(num_tokens).__invert__()
    return tokens + text if isinstance(tokens, Mixture) else tokens | text


def _order_of(module: Any) -> Order | None:
    return _ORDERS.get(_processor_name(module))


def _processor_name(module: Any) -> str:
    return type(getattr(module, "processor", None) or module.attn.processor).__name__


def _unsupported(module: Any) -> str:
    """Return a text for errors: the name of a module's processor, why it cannot be converted, and what to do."""
    name = _processor_name(module)
    return f"{name}, {_UNSUPPORTED.get(name, _UNKNOWN)}; {_REMEDY}"


def candidate_of(name: str, module: Any, model: nn.Module) -> Candidate | None:
    """Return the `Candidate` of a module of diffusers that computes attention by a processor; None for other modules.

    name: name of the module in `model`.

    For a module that cannot be converted, `refusal` of the result is the reason.
    """
    kind = original_class(module)
    if not (kind.__module__.startswith("diffusers.") and "Attention" in kind.__name__ and hasattr(module, "processor")):
        return None
    enclosing = ancestors(name, model)
    block = enclosing[-1] if enclosing else module
    joined = _processor_name(module) in _JOINED and module.added_kv_proj_dim is None
    return Candidate(
        name,
        module,
        next((getattr(module, each) for each in ("heads", "num_heads") if hasattr(module, each)), 0),
        block if joined else module,
        converted_class=DiffusersAttention,
        refusal=_refusal(module, [original_class(each).__name__ for each in enclosing], joined),
        cross_reason=_why_cross(name, module),
    )


def _refusal(module: Any, enclosing: list[str], joined: bool) -> str:
    """Return the reason why a module cannot be converted; "" if it can.

    enclosing: class names of the modules that contain it, outermost first.
    joined: True if it gets text and image in one sequence.
    """
    processor = _processor_name(module)
    if _order_of(module) is None:
        return f"its processor is {_unsupported(module)}"
    if processor in _ONLY_IN and _ONLY_IN[processor] not in enclosing:
        return f"its processor is {processor}, which convert knows in {_ONLY_IN[processor]} alone; {_REMEDY}"
    if joined and not (enclosing and enclosing[-1] in _JOINING_BLOCKS):
        return _IN_ONE_SEQUENCE
    return next((_OTHER_TOKENS[each] for each in enclosing if each in _OTHER_TOKENS), "")


def _why_cross(name: str, module: Any) -> str:
    own_name = name.rpartition(".")[2]
    if _order_of(module) != "separate" or (own_name in _SELF_ATTENTION and not _is_cross(module)):
        return ""
    if own_name.endswith("attn1"):
        return "self-attention among other tokens than those of the image or video"
    return "cross-attention to a text"


def _is_cross(module: Any) -> bool:
    return bool(getattr(module, "is_cross_attention", False))
