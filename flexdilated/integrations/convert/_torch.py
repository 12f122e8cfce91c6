"""`nn.MultiheadAttention`, as in torch's encoders and decoders, torchvision's ViT and many other models."""

from __future__ import annotations

from torch import Tensor, nn

from ..._attend import attend
from ...masks import causal
from ...nn import MultiheadProjections, refuse_weights, without_padding
from ._rule import Candidate, Converted, ancestors, check_lengths, original_class, with_causal_mask


class MultiheadAttention(MultiheadProjections, Converted):
    """Converted `nn.MultiheadAttention`: its projections, with attention by the pattern between them.

    `nn.TransformerEncoderLayer` calls it in all modes, instead of running its own dense kernel in inference.
    """

    dropout: float

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return (output in the shape of query, None for the weights); arguments as in torch.

        With is_causal or a causal attn_mask the pattern is intersected with causal order. In training, `dropout` is
        applied to the attention weights. need_weights defaults to False, unlike in torch, so that callers that omit it
        and discard the weights keep working. Raises ValueError for need_weights=True, for an attn_mask that is not
        causal, and for numbers of queries and keys that do not fit the pattern.
        """
        refuse_weights(need_weights)
        given = self._flexdilated
        assert given is not None
        q, k, v = self.heads_of(query, key, value)
        check_lengths(given, q.shape[2], k.shape[2])
        if attn_mask is None and not is_causal:
            given.check_grid(min(q.shape[2], k.shape[2]))
        pattern = given.pattern
        if attn_mask is not None:
            pattern = with_causal_mask(pattern, attn_mask, (q.shape[2], k.shape[2]))
        elif is_causal:
            pattern = pattern & causal()
        pattern = without_padding(pattern, key_padding_mask, self.padding_mask_shape(key), batch_first=self.batch_first)
        dropout_p = self.dropout if self.training else 0.0
        return self.output_of(attend(q, k, v, pattern, dropout_p=dropout_p, q_offset=0), query.dim()), None


class TransformerEncoder(Converted):
    """`nn.TransformerEncoder` that passes padded tensors to its layers, where torch's uses nested ones in inference."""

    @property
    def use_nested_tensor(self) -> bool:
        """False, so that torch passes padded tensors; this property hides the attribute that torch sets."""
        return False


def candidate_of(name: str, module: nn.Module, model: nn.Module) -> Candidate | None:
    """Return the `Candidate` of a module of class `nn.MultiheadAttention` or a subclass; None for any other module.

    name: name of the module in `model`.

    A subclass with its own forward, and a module with add_bias_kv or add_zero_attn, cannot be converted; `refusal`
    of the result is then the reason.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return None
    above = ancestors(name, model)
    return Candidate(
        name,
        module,
        module.num_heads,
        module,
        converted_class=MultiheadAttention,
        refusal=_refusal_reason(module),
        cross_reason=_cross_reason(name, module, above),
        enclosing=tuple((each, TransformerEncoder) for each in above if isinstance(each, nn.TransformerEncoder)),
    )


def _refusal_reason(module: nn.MultiheadAttention) -> str:
    if original_class(module).forward is not nn.MultiheadAttention.forward:
        return "its class has a forward of its own"
    if module.bias_k is not None:
        return "add_bias_kv appends a key that has no position"
    if module.add_zero_attn:
        return "add_zero_attn appends a key that has no position"
    return ""


def _cross_reason(name: str, module: nn.MultiheadAttention, above: list[nn.Module]) -> str:
    if above and isinstance(above[-1], nn.TransformerDecoderLayer) and name.endswith("multihead_attn"):
        return "cross-attention of a decoder layer"
    if not module.kdim == module.vdim == module.embed_dim:
        return "its keys or values have another width: cross-attention"
    return ""
