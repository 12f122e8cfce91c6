"""With all pairs a converted model is what it was; with a pattern, what it is with the pattern's dense mask."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import x_transformers
from torch import nn

import flexdilated as fd
from flexdilated import masks
from tests.integrations.passes import assert_same_step, counts

from .families import (
    FAMILIES,
    HEADS,
    dense_attention,
    features,
    language_model,
    model_of,
    outputs,
    step,
    words,
)

WINDOW = masks.local_window(left=3, right=2)
# Each holds a token itself: SDPA has no use for a row without keys.
PATTERNS = {
    "window": WINDOW,
    "class token": masks.global_tokens(1) | masks.local_window(left=2, right=2),
    "per head": masks.per_head([masks.local_window(left=5, right=5), masks.chunked(6)] * (HEADS // 2)),
    "longnet": masks.longnet((4, 16), (1, 2)) + masks.local_window(left=0, right=0),
}
CASES = [*zip(FAMILIES, cycle(PATTERNS), strict=False), *(("encoder", pattern) for pattern in list(PATTERNS)[1:])]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_pairs_change_nothing_and_undone_is_bit_equal(name: str) -> None:
    """Outputs and all gradients in training, and outputs in eval without gradients, where torch has other paths.

    Nothing of a conversion is left: classes and attributes of all modules are those of before.
    """
    model = model_of(name).eval()
    with torch.no_grad():
        inferred = outputs(model, name)
    before = [(type(module), dict(vars(module))) for module in model.train().modules()]
    trained = step(model, name)
    report = fd.convert(model, masks.every())
    assert len(report.replaced) == FAMILIES[name].replaced
    assert {each.num_heads for each in report.replaced} == {HEADS}
    assert_same_step(step(model, name), trained)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model.eval(), name), inferred, rtol=1e-5, atol=1e-5)
    fd.convert(model, WINDOW)
    assert not torch.equal(outputs(model.train(), name), trained[0])
    assert fd.convert(model, None).replaced == ()
    out, grads = step(model, name)
    assert torch.equal(out, trained[0])
    assert all(torch.equal(grads[each], trained[1][each]) for each in trained[1])
    with torch.no_grad():
        assert torch.equal(outputs(model.eval(), name), inferred)
    model.train()
    for module, (kind, held) in zip(model.modules(), before, strict=True):
        assert type(module) is kind
        assert vars(module).keys() == held.keys()
        assert all(vars(module)[each] is held[each] or vars(module)[each] == held[each] for each in held)


@pytest.mark.parametrize(("name", "pattern"), CASES)
def test_a_pattern_equals_its_dense_mask(name: str, pattern: str) -> None:
    """By the formula of `scaled_dot_product_attention`, or by x-transformers' own mask where it forms weights."""
    model, family, rule = model_of(name).train(), FAMILIES[name], PATTERNS[pattern]
    rule = rule if family.fused else rule.union
    times = counts(rule, family.tokens, num_heads=HEADS)
    cross = 2 if name == "nn.Transformer" else 0
    plain = outputs(model, name).detach()
    with dense_attention(times) as calls:
        want = step(model, name, **({} if family.fused else {"attn_mask": times > 0}))
    assert calls[0] == (family.replaced + cross if family.fused else 0)
    fd.convert(model, (lambda *_: rule) if cross else rule)
    got = step(model, name)
    assert_same_step(got, want)
    assert not torch.allclose(got[0], plain, atol=1e-3)
    with torch.no_grad():  # no path of the library goes past the pattern
        torch.testing.assert_close(outputs(model.eval(), name), got[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder", "encoder, tokens first"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("hidden", [slice(15, 21), slice(8, 10)], ids=["right", "inside"])
def test_padding_composes(train: bool, hidden: slice, name: str) -> None:
    """In eval without gradients torch would make nested tensors of it, and run its fused kernels."""
    model, (x,), rule = model_of(name), FAMILIES[name].inputs(), PATTERNS["class token"]
    padding = torch.zeros(2, 21, dtype=torch.bool)
    padding[1, hidden] = True
    want = model(x, mask=counts(rule, 21)[0] == 0, src_key_padding_mask=padding)
    fd.convert(model.train(train), rule)
    with torch.set_grad_enabled(train):
        got = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_a_causal_mask_composes(train: bool) -> None:
    model, (x,) = model_of("encoder").train(train), features()
    fd.convert(model, WINDOW & masks.causal())
    want = model(x)
    fd.convert(model, WINDOW)
    mask = nn.Transformer.generate_square_subsequent_mask(21)
    for options in ({"mask": mask, "is_causal": True}, {"mask": mask}):
        assert torch.equal(model(x, **options), want)
    assert not torch.allclose(model(x), want, atol=1e-3)


@torch.no_grad()
def test_x_transformers_generates_what_it_generates_without_a_cache() -> None:
    """A cache hands over one query and all keys: the query is the last of them."""
    torch.manual_seed(0)
    writer = x_transformers.AutoregressiveWrapper(language_model().eval())
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
    want = model(tokens, mask=kept, attn_mask=counts(WINDOW, 24, num_heads=HEADS) > 0)
    fd.convert(model, WINDOW)
    torch.testing.assert_close(model(tokens, mask=kept)[kept], want[kept], rtol=0, atol=1e-5)
    mems = [torch.randn(2, 5, 32), torch.randn(2, 5, 32)]
    fd.convert(model, masks.every())
    got = model(tokens, mems=mems)
    fd.convert(model, None)
    torch.testing.assert_close(got, model(tokens, mems=mems), rtol=0, atol=1e-5)
