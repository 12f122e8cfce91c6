"""Converted models are what they were, or what they are with the dense mask; each option of x-transformers."""

import inspect
from itertools import cycle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import x_transformers
from hypothesis import given
from torch import nn
from x_transformers import Decoder, Encoder, TransformerWrapper
from x_transformers.x_transformers import Attention, AttentionLayers

import flexdilated as fd
from bench._dense import counts, dense_attention
from flexdilated import masks
from tests.integrations.passes import assert_same_step

from .families import FAMILIES, HEADS, WIDTH, features, language_model, model_of, outputs, step, words

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
    with dense_attention(lambda *lengths: times if lengths == times.shape[-2:] else None) as calls:
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


def test_each_option() -> None:
    """Alone, of a decoder and an encoder in turn; few make a model that is not built, or not called in this way."""
    layers = cycle([Decoder, Encoder])
    found = {name: _hold(next(layers), {name: value}) for name, value in _OPTIONS.items()}
    counts = [list(found.values()).count(kind) for kind in (True, False, None)]
    assert counts[0] > 40
    assert counts[1] > 15
    assert counts[2] < 20
    assert found["polar_pos_emb"] is False
