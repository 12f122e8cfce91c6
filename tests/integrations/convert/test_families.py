"""With all pairs a converted model is what it was; with a pattern, what it is with the pattern's dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flexdilated as fd
from flexdilated import masks

from .families import (
    FAMILIES,
    HEADS,
    assert_same_step,
    dense,
    dense_attention,
    encoder,
    features,
    language_model,
    model_of,
    outputs,
    step,
    words,
)

# Each holds a token itself: SDPA has no use for a row without keys.
PATTERNS = {
    "window": masks.local_window(left=3, right=2),
    "longnet": masks.longnet((4, 16), (1, 2)).union | masks.local_window(left=0, right=0),
    "class token": masks.global_tokens(1) | masks.local_window(left=2, right=2),
    "per head": masks.per_head([masks.local_window(left=5, right=5), masks.chunked(6)] * (HEADS // 2)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_all_pairs_change_nothing(name: str) -> None:
    """Outputs and all gradients in training, and outputs in eval without gradients, where torch has other paths."""
    model = model_of(name)
    trained = step(model.train(), name)
    with torch.no_grad():
        inferred = outputs(model.eval(), name)
    report = fd.convert(model, masks.every())
    assert len(report.replaced) == FAMILIES[name].replaced
    assert {each.num_heads for each in report.replaced} == {HEADS}
    assert_same_step(step(model.train(), name), trained)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model.eval(), name), inferred, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, pattern) for name, family in FAMILIES.items() if family.fused for pattern in PATTERNS
     if name in ("encoder", "timm") or pattern == ("per head" if family.replaced == 4 or "x-" in name else "longnet")],
)  # fmt: skip
def test_a_pattern_equals_its_dense_mask(name: str, pattern: str) -> None:
    model, rule = model_of(name).train(), PATTERNS[pattern]
    with dense_attention(dense(rule, FAMILIES[name].tokens)) as calls:
        want = step(model, name)
    cross = 2 if name == "nn.Transformer" else 0
    assert calls[0] == FAMILIES[name].replaced + cross
    fd.convert(model, (lambda *_: rule) if cross else rule)
    got = step(model, name)
    assert_same_step(got, want)
    assert not torch.allclose(got[0], outputs(model_of(name).train(), name), atol=1e-3)
    with torch.no_grad():  # no path of the library goes past the pattern
        torch.testing.assert_close(outputs(model.eval(), name), got[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "prefix"), [("torchvision", 1), ("timm", 1), ("timm, qk_norm", 4), ("timm, EVA", 1)])
def test_neighbourhoods_of_patches_behind_class_and_register_tokens(name: str, prefix: int) -> None:
    """Against distances on the grid of 4 x 4 patches, by hand."""
    model = model_of(name)
    place = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    seen = torch.ones(prefix + 16, prefix + 16, dtype=torch.bool)
    centre = place.clamp(1, 2)  # NATTEN's windows stay whole at the edges
    seen[prefix:, prefix:] = (centre[:, None] - place[None]).abs().amax(-1) <= 1
    with dense_attention(seen.expand(HEADS, -1, -1)):
        want = step(model, name)
    fd.convert(model, masks.neighborhood((4, 4), 1).after(prefix) | masks.global_tokens(prefix))
    assert_same_step(step(model, name), want)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [*((pattern, {}) for pattern in PATTERNS), ("longnet", {"attn_head_learned_sink": True}),
     ("per head", {"attn_one_kv_head": True})],
    ids=str,
)  # fmt: skip
def test_x_transformers_equals_its_own_mask(pattern: str, options: dict[str, bool]) -> None:
    """`attn_mask` of the library, on the path that forms attention weights."""
    torch.manual_seed(0)
    model = language_model(**options)
    rule = PATTERNS[pattern]
    want = model(*words(), attn_mask=dense(rule, 24))
    fd.convert(model, rule)
    torch.testing.assert_close(model(*words()), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder", "encoder, tokens first"])
def test_an_encoder_equals_its_own_mask(name: str) -> None:
    model, rule = model_of(name), PATTERNS["window"]
    want = model(*FAMILIES[name].inputs(), mask=~dense(rule, 21)[0])
    fd.convert(model, rule)
    torch.testing.assert_close(outputs(model, name), want, rtol=0, atol=1e-5)


def test_a_mixture_is_one() -> None:
    """Branches are joined by their log-sum-exp: a pair in two of them counts twice."""
    model, mixture = model_of("encoder"), masks.longnet((4, 16), (1, 2))
    fd.convert(model, mixture)
    joined = outputs(model, "encoder")
    fd.convert(model, mixture.union)
    assert not torch.allclose(joined, outputs(model, "encoder"), atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("hidden", [slice(15, 21), slice(8, 10)], ids=["right", "inside"])
def test_padding_composes(train: bool, hidden: slice) -> None:
    """In eval without gradients torch would make nested tensors of it, and run its fused kernels."""
    model, (x,), rule = model_of("encoder"), features(), PATTERNS["class token"]
    padding = torch.zeros(2, 21, dtype=torch.bool)
    padding[1, hidden] = True
    want = model(x, mask=~dense(rule, 21)[0], src_key_padding_mask=padding)
    fd.convert(model.train(train), rule)
    with torch.set_grad_enabled(train):
        got = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_on_the_left(batch_first: bool) -> None:
    """A window depends on distances alone: the padded row is the row without its padding."""
    torch.manual_seed(0)
    model, (x,) = encoder(batch_first).eval(), features()
    fd.convert(model, PATTERNS["window"])
    padding = torch.zeros(2, 21, dtype=torch.bool)
    padding[1, :6] = True
    turned = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    got = turned(model(turned(x), src_key_padding_mask=padding))
    torch.testing.assert_close(got[1:, 6:], turned(model(turned(x[1:, 6:]))), rtol=0, atol=1e-5)


def causal_mask(num_tokens: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(num_tokens)


@pytest.mark.parametrize("train", [True, False])
def test_a_causal_mask_composes(train: bool) -> None:
    model, (x,) = model_of("encoder").train(train), features()
    window = masks.local_window(left=3, right=2)
    fd.convert(model, window & masks.causal())
    want = model(x)
    fd.convert(model, window)
    for options in ({"mask": causal_mask(21), "is_causal": True}, {"mask": causal_mask(21)}):
        assert torch.equal(model(x, **options), want)
    assert not torch.allclose(model(x), want, atol=1e-3)


def test_causal_layers_of_x_transformers_compose() -> None:
    """A decoder's own causal order holds beside a pattern that looks ahead."""
    torch.manual_seed(0)
    model = language_model()
    fd.convert(model, masks.local_window(left=3, right=0))
    want = model(*words())
    fd.convert(model, masks.local_window(left=3, right=9))
    assert torch.equal(model(*words()), want)


@torch.no_grad()
def test_x_transformers_generates_what_it_generates_without_a_cache() -> None:
    """A cache hands over one query and all keys: the query is the last of them."""
    import x_transformers

    torch.manual_seed(0)
    model = language_model().eval()
    writer = x_transformers.AutoregressiveWrapper(model)
    fd.convert(writer, masks.longnet((4, 16), (1, 2)))
    prompt = words()[0][:, :9]
    cached = writer.generate(prompt, 9, temperature=0.0, cache_kv=True)
    assert torch.equal(cached, writer.generate(prompt, 9, temperature=0.0, cache_kv=False))
    fd.convert(writer, None)
    assert not torch.equal(cached, writer.generate(prompt, 9, temperature=0.0))


def test_x_transformers_padding_and_memories() -> None:
    torch.manual_seed(0)
    model, (tokens,) = language_model(), words()
    kept = torch.ones(2, 24, dtype=torch.bool)
    kept[1, 17:] = False
    rule = PATTERNS["window"]
    want = model(tokens, mask=kept, attn_mask=dense(rule, 24))
    fd.convert(model, rule)
    torch.testing.assert_close(model(tokens, mask=kept)[kept], want[kept], rtol=0, atol=1e-5)
    mems = [torch.randn(2, 5, 32), torch.randn(2, 5, 32)]
    fd.convert(model, masks.every())
    got = model(tokens, mems=mems)
    fd.convert(model, None)
    torch.testing.assert_close(got, model(tokens, mems=mems), rtol=0, atol=1e-5)
