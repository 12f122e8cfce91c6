"""Peer: dense attention, PyTorch's own scaled_dot_product_attention."""

from functools import partial

from torch.nn.functional import scaled_dot_product_attention

from ._problem import Attention


def dense_attention(*, causal: bool) -> Attention:
    """(q, k, v) -> out, each (B, H, N, D)."""
    return partial(scaled_dot_product_attention, is_causal=causal)
