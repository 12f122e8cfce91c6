"""LongNetEncoder: torchscale's function at every length, its gradients on demand, its configs and its errors."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flexdilated.integrations.torchscale import LongNetEncoder, LongNetEncoderConfig
from tests.integrations.torchscale import plain
from tests.support.agreement import TIGHT

SIZES: dict[str, Any] = {
    "encoder_embed_dim": 24,
    "encoder_attention_heads": 3,
    "encoder_ffn_embed_dim": 40,
    "encoder_layers": 2,
    "segment_length": "[8, 20, 50]",
    "dilated_ratio": "[1, 3, 4]",
}
BRANCHES = ((8, 20, 50), (1, 3, 4))


def made(seed: int = 0, *, segment_length: Any = None, dilated_ratio: Any = None, **changes: Any) -> LongNetEncoder:
    """Weights of any size: norms too are not those of a new module."""
    torch.manual_seed(seed)
    branches = {"segment_length": segment_length, "dilated_ratio": dilated_ratio} if segment_length else {}
    encoder = LongNetEncoder.from_torchscale(SIZES | branches, **changes).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


def gradients(encoder: LongNetEncoder, out: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(out.sin().sum(), parameters), strict=True))


branches = st.lists(st.tuples(st.integers(9, 60), st.integers(1, 6)), min_size=1, max_size=3)


@settings(max_examples=16)
@given(
    st.one_of(st.just(list(zip(*BRANCHES, strict=True))), branches),
    st.one_of(st.integers(1, 130), st.just(97)),
    st.sampled_from(["exact", "detached"]),
)
def test_outputs_and_gradients_are_published(branches, N, merge_grad) -> None:
    """Segments that are cut, longer than the sequence, or that their rate does not divide; of all parameters."""
    segments, rates = (list(each) for each in zip(*branches, strict=True))
    encoder = made(N, segment_length=segments, dilated_ratio=str(rates), merge_grad=merge_grad)
    x, weights = torch.randn(2, N, 24, dtype=torch.float64), dict(encoder.named_parameters())
    how = {"num_heads": 3, "branches": (segments, rates), "detached": merge_grad == "detached"}
    *states, truth = plain.encoder(weights, x, **how)
    out = encoder(x)
    assert_close(out, truth, **TIGHT)
    assert_close(encoder(x, all_layers=True), tuple(states), **TIGHT)
    found, wanted = gradients(encoder, out), gradients(encoder, truth)
    for name in wanted:
        assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_training_leaves_out() -> None:
    """Dropout, and layers left out for some rows, more of them the later they are; nothing in eval mode."""
    x = torch.randn(2, 40, 24, dtype=torch.float64)
    encoder = made(dropout=0.5, activation_dropout=0.3, attention_dropout=0.2)
    assert not torch.equal(encoder(x), encoder(x))
    encoder.eval()
    assert torch.equal(encoder(x), encoder(x))
    encoder, rows = made(drop_path=0.5), x[:1, :3].expand(400, -1, -1)
    first, after, last = encoder(rows, all_layers=True)
    assert (after == after[0]).all(), "the first layer is never left out"
    both = (last == after).all((1, 2)).double().mean()  # neither attention nor feed-forward
    assert 0.15 < both < 0.35
    mean, scale = last.mean(0), made(drop_path=0.0)(x[:1, :3], all_layers=True)[2]
    assert (mean - scale[0]).norm() < 0.25 * (scale[0] - first[0]).norm()


def test_configs_are_read() -> None:
    config = LongNetEncoderConfig.from_torchscale(
        SIZES | {"dropout": 0.1, "block_shift": True, "flash_attention": True}
    )
    assert (config.segment_lengths, config.dilation_rates, config.dropout) == (*BRANCHES, 0.1)
    assert LongNetEncoderConfig.from_torchscale(SIZES | {"attention_dropout": 0.3}).attention_dropout == 0.3
    assert (config.padding, config.merge_grad, config.norm_eps) == ("zeros", "exact", 1e-5)
    usual = LongNetEncoderConfig.from_torchscale({"segment_length": [8], "dilated_ratio": (1,)}, padding=None)
    assert (usual.embed_dim, usual.num_heads, usual.ffn_dim, usual.depth) == (768, 12, 3072, 12)
    assert usual.padding is None
    bare = LongNetEncoder.from_torchscale(SIZES | {"normalize_output": False})
    assert bare.layer_norm is None
    x = torch.randn(1, 9, 24)
    assert torch.equal(bare(x), bare(x, all_layers=True)[-1])
