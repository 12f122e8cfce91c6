"""Every boolean option of x-transformers' layers: a converted model computes what it did, or convert refuses it."""

from __future__ import annotations

import inspect
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from x_transformers import Decoder, Encoder, TransformerWrapper
from x_transformers.x_transformers import Attention, AttentionLayers

import flexdilated as fd
from flexdilated import masks

from .families import HEADS, WIDTH


def _toggled(of: type) -> dict[str, bool]:
    """Each boolean option, at the other value than its default."""
    options = inspect.signature(of.__init__).parameters.items()
    return {name: not option.default for name, option in options if isinstance(option.default, bool)}


# Those that a Decoder and an Encoder, or other options, decide are no options of their attention.
_NO_OPTIONS = {"causal", "attn_causal", "attn_learned_value_residual_mix", "attn_qkv_receive_diff_residuals", "verbose"}
_OPTIONS: dict[str, Any] = _toggled(AttentionLayers)
_OPTIONS |= {f"attn_{name}": value for name, value in _toggled(Attention).items()}
_OPTIONS |= {"attn_value_dim_head": 8, "attn_kv_heads": 2, "attn_num_mem_kv": 2, "attn_sparse_topk": 4}
_OPTIONS |= {"attn_max_attend_past": 4, "attn_gate_values_rank": 4, "shift_tokens": 1, "num_residual_streams": 2}
_OPTIONS = {name: value for name, value in _OPTIONS.items() if name not in _NO_OPTIONS}
_WITH = {
    "attn_use_latent_q": {"attn_dim_latent_q": 16},
    "attn_use_latent_kv": {"attn_dim_latent_kv": 16},
    "attn_qk_norm_dim_scale": {"attn_qk_norm": True},
    "rotary_xpos": {"rotary_pos_emb": True},
    "cross_residual_attn": {"cross_attend": True},
}


def _model(layers: type, options: dict[str, Any]) -> Any:
    """The model, or None where the library refuses the options, or the model its input."""
    more = {name: value for option in options for name, value in _WITH.get(option, {}).items()}
    try:
        made: Any = layers(dim=WIDTH, depth=2, heads=HEADS, **{"attn_dim_head": 16, **more, **options})
        model = TransformerWrapper(num_tokens=30, max_seq_len=64, attn_layers=made).eval()
        _called(model)
    except (AssertionError, TypeError):
        return None
    for x in model.parameters():
        torch.nn.init.normal_(x, *((0.5, 0.3) if x.dim() < 2 else (0.0, x[0].numel() ** -0.5)))
    return model


@torch.no_grad()
def _called(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    context = {"context": torch.randn(2, 9, WIDTH)} if model.attn_layers.cross_attend else {}
    return model(torch.randint(30, (2, 20)), **context)


def _hold(layers: type, options: dict[str, Any]) -> bool | None:
    """Whether the model was converted, and then computes what it did; None for one that cannot be built."""
    torch.manual_seed(0)
    if (model := _model(layers, options)) is None:
        return None
    before = _called(model)
    try:
        fd.convert(model, masks.causal() if layers is Decoder else masks.every())
    except ValueError:
        return False
    torch.testing.assert_close(_called(model), before, rtol=1e-4, atol=1e-4)
    return True


@given(st.sampled_from([Decoder, Encoder]), st.sets(st.sampled_from(list(_OPTIONS)), min_size=2, max_size=4))
def test_drawn_options(layers: type, names: set[str]) -> None:
    _hold(layers, {name: _OPTIONS[name] for name in sorted(names)})


@pytest.mark.parametrize("layers", [Decoder, Encoder])
def test_each_option(layers: type) -> None:
    """Alone; few make a model that is not built, or not called in this way."""
    found = {name: _hold(layers, {name: value}) for name, value in _OPTIONS.items()}
    counts = [list(found.values()).count(kind) for kind in (True, False, None)]
    assert counts[0] > 40
    assert counts[1] > 15
    assert counts[2] < 20
    assert found["polar_pos_emb"] is False
