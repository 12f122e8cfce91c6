"""Models of diffusers with a pattern: with all pairs, beside its dense mask, in one graph, and undone."""

import re
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

import flexdilated as fd
from flexdilated import masks
from flexdilated.integrations.convert._diffusers import _ORDERS
from tests.integrations.passes import Step, assert_same_step, counts, gradients_of

from .diffusers_models import GRID, HEADS, MODELS, TOKENS, diffusers, model_of, output, with_text
from .families import dense_attention, loss

NEAR = masks.neighborhood(GRID, (1, 1, 1))
PATTERNS = {
    "near": NEAR,
    "per head": masks.per_head([NEAR, masks.strided(16) | masks.chunked(16)]),
    "longnet": masks.longnet((8, 48), (1, 3)) + masks.local_window(left=0, right=0),
}


def step(model: nn.Module, name: str) -> Step:
    model.zero_grad()
    out = output(model, name)
    loss(out).backward()
    return out.detach(), gradients_of(model)


@pytest.mark.parametrize(("name", "pattern"), [*zip(MODELS, cycle(PATTERNS), strict=False)])
def test_a_pattern_equals_its_dense_mask(name: str, pattern: str) -> None:
    """In training and in eval; all pairs change nothing, and undone is bit-equal."""
    model, own = model_of(name), MODELS[name]
    trained = step(model, name)
    report = fd.convert(model, masks.every())
    assert len(report.replaced) == own.replaced
    assert {each.num_heads for each in report.replaced} == {HEADS}
    assert_same_step(step(model, name), trained)
    fd.convert(model, None)
    times = with_text(counts(PATTERNS[pattern], TOKENS, num_heads=HEADS), own.text)
    alone = counts(PATTERNS[pattern], TOKENS, num_heads=HEADS)
    with dense_attention(times) as calls, dense_attention(alone) as calls_alone:
        want = step(model, name)
    assert calls[0] + calls_alone[0] == own.replaced
    fd.convert(model, PATTERNS[pattern])
    got = step(model, name)
    assert_same_step(got, want)
    assert not torch.allclose(got[0], trained[0], atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(output(model.eval(), name), got[0], rtol=1e-5, atol=1e-5)
    fd.convert(model.train(), None)
    assert torch.equal(output(model, name), trained[0])


@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo", "Flux"])
def test_one_graph(name: str) -> None:
    model = model_of(name)
    fd.convert(model, NEAR)
    want = step(model, name)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same_step(step(model, name), want)


def test_cross_attention_takes_a_pattern_of_a_function_only() -> None:
    """Even where the text has as many tokens as the video."""
    model = model_of("Wan")
    report = fd.convert(model, lambda name, module: masks.first_tokens(2) if name.endswith("attn2") else None)
    assert [each.name for each in report.replaced] == ["blocks.0.attn2", "blocks.1.attn2"]
    inputs = MODELS["Wan"].inputs()
    with torch.no_grad():
        want = model(**inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :2]}, return_dict=False)[0]
        torch.testing.assert_close(output(model, "Wan"), want, rtol=1e-5, atol=1e-5)
    fd.convert(model, NEAR)
    attention = model.blocks[0].attn1
    x = torch.randn(1, TOKENS, HEADS * 12)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1 was called with a text"):
        attention(x, encoder_hidden_states=x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_unknown_processors_and_other_backends_are_refused() -> None:
    """Before a conversion, in the report; after it, by the call."""

    class Mine:
        def __call__(self, attn, hidden_states, *args, **options):
            return hidden_states

    model = model_of("SD3")
    model.transformer_blocks[1].attn.set_processor(Mine())
    report = fd.convert(model, NEAR)
    (left,) = report.left
    assert (left.name, left.kind) == ("transformer_blocks.1.attn", "diffusers.Attention")
    assert left.reason.startswith("its processor is Mine, which convert does not know")
    model.transformer_blocks[0].attn.set_processor(Mine())
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn has the processor Mine, which convert does not"):
        output(model, "SD3")
    model = model_of("Wan")
    fd.convert(model, NEAR)
    said = re.escape('write model.set_attention_backend("native"), or give convert')
    with torch.no_grad(), diffusers().attention_backend("flex"), pytest.raises(ValueError, match=said):
        output(model, "Wan")
    assert output(model, "Wan").isfinite().all()


def test_the_page_lists_the_processors() -> None:
    page = (Path(__file__).parents[3] / "docs/integrations/diffusers.md").read_text()
    assert set(re.findall(r"`(\w+AttnProcessor\w*|AttnProcessor2_0)`", page)) == set(_ORDERS)


def test_a_grid_of_fewer_tokens_is_refused() -> None:
    model = model_of("HunyuanVideo")
    fd.convert(model, masks.neighborhood((2, 4, 4), (0, 1, 1)))
    with pytest.raises(ValueError, match="within the 32 tokens of a 2x4x4 grid"):
        output(model, "HunyuanVideo")
