"""Without a pattern a model is what it is with SDPA; with one, what it is with the pattern's dense mask."""

from __future__ import annotations

import pytest
import torch

from flexdilated import masks
from flexdilated.integrations.transformers import attention_layers, set_pattern
from flexdilated.integrations.transformers._attention import attention
from tests.integrations.passes import Step, assert_same_step, counts, gradients_of

from .models import DECODERS, FAMILIES, NUM_HEADS, batch_of, model_of, real_logits, tokens

# N tokens of a row, H heads

LONGNET = masks.longnet((4, 16), (1, 2))
PATTERNS = {
    "longnet": LONGNET,
    "strided": masks.strided(3) | masks.local_window(left=2, right=0),
    "per head": masks.per_head([masks.local_window(left=5, right=5), masks.chunked(8)] * (NUM_HEADS // 2)),
    "first tokens": masks.first_tokens(2) | masks.local_window(left=3, right=1),
}


def step(model, name: str, padding: str | None, implementation: str) -> Step:
    """Logits of real tokens."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = real_logits(model, batch_of(name, padding))
    logits.pow(2).sum().backward()
    return logits.detach(), gradients_of(model)


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, padding) for name in FAMILIES for padding in (None, "left", "right")
     if (FAMILIES[name].inputs != "tokens") == (padding is None) or (name, padding) == ("llama", None)],
)  # fmt: skip
def test_equals_sdpa(name: str, padding: str | None) -> None:
    model = model_of(name).train()
    # gpt-oss has sinks, which sdpa does not take.
    want = step(model, name, padding, "eager" if name == "gpt-oss" else "sdpa")
    assert_same_step(step(model, name, padding, "flexdilated"), want)


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("added", [True, False])
def test_a_ready_made_mask_that_hides_keys(entries: int, added: bool) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 16)
    visible = torch.rand(entries, 1, 1, 9) < 0.6
    visible[..., 4] = True
    given = torch.zeros(visible.shape).masked_fill(~visible, -1e4) if added else visible
    got, _ = attention(torch.nn.Identity(), q, k, v, given)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    rows = visible[:, 0, 0].expand(2, -1)
    torch.testing.assert_close(got[rows], want.transpose(1, 2)[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("compose", "padding"), [("and", None), ("replace", "inside")])
def test_a_pattern_equals_its_dense_mask(pattern: str, compose: str, padding: str | None) -> None:
    """A pair in two branches of a mixture counts twice."""
    model, batch = model_of("llama"), batch_of("llama", padding)
    rule = PATTERNS[pattern]
    times = counts(rule & masks.causal() if compose == "and" else rule, tokens().shape[1], num_heads=NUM_HEADS)
    visible = batch["attention_mask"].bool()
    model.set_attn_implementation("sdpa")
    ready_made = times[None] * visible[:, None, None, :]
    want = model(tokens(), attention_mask=ready_made.log()).logits
    set_pattern(model, rule, compose=compose)
    rows = ready_made.any(-1).all(1) & visible  # SDPA has no use for a row without keys
    torch.testing.assert_close(model(**batch).logits[rows], want[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [*((name, "longnet") for name in (*DECODERS, "bert", "modernbert")),
     ("llama", "strided"), ("gpt-oss", "per head"), ("modernbert", "first tokens")],
)  # fmt: skip
@torch.no_grad()
def test_a_padded_row_is_the_row_alone(name: str, pattern: str) -> None:
    model = model_of(name)
    set_pattern(model, PATTERNS[pattern])
    left, right = batch_of(name, "left"), batch_of(name, "right")
    if name not in ("bert", "gpt2"):  # whose learned positions begin with the padding
        torch.testing.assert_close(model(**left).logits[1:, 17:], model(tokens()[1:, 17:]).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(**right).logits[1:, :33], model(tokens()[1:, :33]).logits, rtol=0, atol=1e-5)


def test_all_layers_are_found() -> None:
    counts = {name: len(attention_layers(model_of(name))) for name in FAMILIES}
    assert counts == {name: {"llama4": 4, "whisper": 6}.get(name, 2) for name in FAMILIES}
