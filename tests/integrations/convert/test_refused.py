"""What convert leaves, what it refuses and why, and its answers to calls that no pattern serves."""

from __future__ import annotations

import pytest
import torch
import x_transformers
from torch import nn

import flexdilated as fd
from flexdilated import masks
from tests.support.vision import vision

from .families import HEADS, WIDTH, encoder, language_model, outputs, translator, vit

WINDOW = masks.local_window(left=3, right=2)


def test_cross_attention_is_left_unless_it_is_chosen() -> None:
    model = translator()
    left = fd.convert(model, WINDOW).left
    assert [each.name for each in left] == [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
    assert left[0].reason == "cross-attention of a decoder layer; a function of its name may choose a pattern"
    source, target = torch.randn(2, 9, WIDTH), torch.randn(2, 13, WIDTH)
    assert model(source, target).shape == target.shape
    cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=7, vdim=5)
    with pytest.raises(ValueError, match="its keys or values have another width: cross-attention"):
        fd.convert(cross, WINDOW)
    key, value = torch.randn(2, 9, 7), torch.randn(2, 9, 5)
    want = cross(target, key, value, attn_mask=torch.arange(9) > torch.arange(13)[:, None] + 2)[0]
    fd.convert(cross, lambda *_: masks.local_window(left=12, right=2))
    torch.testing.assert_close(cross(target, key, value)[0], want, rtol=0, atol=1e-5)
    layers = x_transformers.Decoder(dim=WIDTH, depth=1, heads=HEADS, cross_attend=True)
    report = fd.convert(layers, WINDOW)
    assert [each.name for each in report.replaced] == ["layers.0.1"]
    assert [(each.name, each.reason.partition(";")[0]) for each in report.left] == [
        ("layers.1.1", "cross-attention of its layers")
    ]


def test_unbatched_and_alone() -> None:
    """The model may be the attention module itself."""
    attention, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(9, WIDTH)
    want = attention(x, x, x, key_padding_mask=torch.arange(9) > 6)[0]
    (replaced,) = fd.convert(attention, masks.every()).replaced
    assert (replaced.name, replaced.kind, replaced.num_heads) == ("", "torch.MultiheadAttention", HEADS)
    got, weights = attention(x, x, x, key_padding_mask=torch.arange(9) > 6)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert weights is None


def test_calls_that_no_pattern_serves() -> None:
    attention, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(9, 2, WIDTH)
    fd.convert(attention, WINDOW)
    with pytest.raises(ValueError, match="need_weights must be False"):
        attention(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match="give convert another rule as part of the pattern, `pattern & other`"):
        attention(x, x, x, attn_mask=torch.zeros(9, 9))
    fd.convert(nn.ModuleDict({"own": attention}), WINDOW)
    with pytest.raises(ValueError, match=r"own was called with 5 queries and 9 keys.*None if name == 'own'"):
        attention(x[:5], x, x)
    model = vit()
    fd.convert(model, WINDOW)
    with pytest.raises(ValueError, match=r"here of shape \(17, 17\); give convert another rule .* \(2, 1, 17, 17\)"):
        model(torch.randn(2, 3, 16, 16), attn_mask=torch.ones(2, 1, 17, 17, dtype=torch.bool))
    writer = language_model()
    fd.convert(writer, WINDOW)
    with pytest.raises(ValueError, match=r"Got a mask that hides other pairs|here of shape \(9, 9\)"):
        writer(torch.zeros(2, 9, dtype=torch.long), attn_mask=torch.ones(9, 9, dtype=torch.bool))


def test_key_masks_of_timm() -> None:
    """NaFlexVit pads images of different sizes, and may say so by a mask of keys alone."""
    model = vision()[0].create_model(
        "naflexvit_base_patch16_gap", embed_dim=WIDTH, num_heads=HEADS, depth=2, patch_size=4, num_classes=5
    )
    torch.manual_seed(0)
    tokens, valid = torch.randn(2, 16, 48), torch.ones(2, 16, dtype=torch.bool)
    valid[1, 12:] = False
    place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
    batch = {"patches": tokens, "patch_coord": place.expand(2, -1, -1), "patch_valid": valid}
    want = model(batch)
    fd.convert(model, masks.every())
    with pytest.raises(ValueError, match="attn_mask must be None, or exactly torch's causal mask"):
        model(batch)
    model.use_key_only_attn_mask = True
    torch.testing.assert_close(model(batch), want, rtol=0, atol=1e-5)


REFUSED = {
    "swin": (lambda: vision()[0].create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)), "within windows"),
    "beit": (lambda: vision()[0].create_model("beit_base_patch16_224", depth=1), "adds a bias for each offset"),
    "cait": (lambda: vision()[0].create_model("cait_xxs24_224", depth=1), "mixes the heads' attention weights"),
    "values": (lambda: vit(attn_layer="diff"), "twice as wide"),
    "bias_kv": (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "add_bias_kv appends a key"),
    "own forward": (
        lambda: type("Mine", (nn.MultiheadAttention,), {"forward": lambda self, x: x})(8, 2),
        "its class has a forward of its own",
    ),
    "ours": (lambda: fd.MultiheadDilatedAttention(8, 2, (4,), (1,)), "it attends by a pattern already"),
    **{
        f"x-transformers, {name}": (lambda options=options: language_model(**options), said)
        for name, options, said in [
            ("memory", {"attn_num_mem_kv": 2}, "num_mem_kv puts keys"),
            ("look back", {"attn_max_attend_past": 3}, "write it as masks.local_window"),
            ("alibi", {"alibi_pos_bias": True, "rotary_pos_emb": False}, "the position bias of its layers"),
            ("sigmoid", {"attn_sigmoid": True}, "its weights are no softmax of the scores"),
            ("clamp", {"attn_softclamp_logits": True}, "softclamp_logits caps scores"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    """Alone in the error; beside a module that is served in the report, and then it is as it was."""
    make, said = REFUSED[name]
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"has no attention module that convert can replace\. It looks for .*" + said):
        fd.convert(model, WINDOW)
    both = nn.ModuleDict({"refused": model, "served": nn.MultiheadAttention(8, 2)})
    report = fd.convert(both, WINDOW)
    assert [each.name for each in report.replaced] == ["served"]
    assert report.left
    assert all(said in each.reason or "class token" in each.reason for each in report.left)
    assert [type(module) for module in model.modules()] == kinds


def test_models_of_transformers_are_sent_on() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"flexdilated\.integrations\.transformers\.set_pattern gives models of trans"):
        fd.convert(LlamaForCausalLM(config), WINDOW)


def test_bad_arguments_change_nothing() -> None:
    model = encoder()
    want = outputs(model, "encoder")
    for pattern, error, said in [
        (lambda *_: "causal", TypeError, r"for 'layers\.0\.self_attn' it returned 'causal'"),
        (masks.per_head([WINDOW] * 3), ValueError, rf"'layers\.0\.self_attn' has {HEADS} heads: "),
        (masks.causal() & masks.documents("ids"), ValueError, r"no run-time tensors.*'layers\.0\.self_attn' got"),
        (lambda name, _: WINDOW if ".0." in name else masks.per_head([WINDOW]), ValueError, r"'layers\.1\.self_attn'"),
    ]:
        with pytest.raises(error, match=said):
            fd.convert(model, pattern)
    assert torch.equal(outputs(model, "encoder"), want)
    assert fd.convert(nn.Linear(2, 2), None) == fd.convert(nn.Linear(2, 2), None)
