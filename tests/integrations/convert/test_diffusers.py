"""Models of diffusers with a pattern: with all pairs, beside its dense mask, in one graph, and undone."""

import json
import re
from itertools import cycle
from pathlib import Path

import pytest
import torch

import flexdilated as fd
from bench.cases.diffusers import HEADS, MODELS, TOKENS, diffusers, model_of, output
from bench.cases.diffusers.sweep import NEAR, PATTERNS, examine, refused, step
from flexdilated import masks
from flexdilated.integrations.convert._diffusers import _ORDERS
from tests.integrations.passes import assert_same_step
from tests.support.vision import vision

ROOT = Path(__file__).parents[3]
# Each has something of its own: the place of the text, blocks that join it, masks, other modules, arguments.
EXAMINED = (
    "Bria FIBO",
    "Flux",
    "HunyuanVideo",
    "HunyuanVideo 1.5",
    "Kandinsky 5",
    "LTX 2",
    "Lumina Next",
    "Mochi",
    "PixArt",
    "Qwen-Image",
    "Stable Diffusion 3",
    "Wan",
)


@pytest.fixture(autouse=True, scope="module")
def needs_diffusers() -> None:
    vision()


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # which Mochi asks for with float32
@pytest.mark.parametrize(("name", "pattern"), [*zip(EXAMINED, cycle(PATTERNS), strict=False)])
def test_a_pattern_equals_its_dense_mask(name: str, pattern: str) -> None:
    """In training and in eval; all pairs change nothing, and undone is bit-equal.

    `python -m bench diffusers` has the other models.
    """
    assert max(examine(name, (pattern,))["far"].values()) <= 1e-4


def test_the_results_are_of_this_version_and_of_all_models() -> None:
    rows = json.loads((ROOT / "bench/results/diffusers.json").read_text())["rows"]
    assert {row["measure"] for row in rows[:-1]} == set(MODELS)
    assert {processor for row in rows[:-1] for processor in row["detail"]["processors"]} == set(_ORDERS)
    assert all(row["met"] for row in rows)
    assert rows[-1]["detail"]["diffusers"] == diffusers().__version__


@pytest.mark.parametrize("name", ["HunyuanVideoFramepackTransformer3DModel", "SanaTransformer2DModel"])
def test_other_models_are_refused(name: str) -> None:
    reasons = refused(getattr(diffusers(), name))
    assert any("past frames" in each or "linear attention" in each for each in reasons), reasons


@pytest.mark.parametrize(
    "name", ["HunyuanVideo", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("Flux", "Wan"))]
)
def test_one_graph(name: str) -> None:
    """Also of a text with padding."""
    model = model_of(name, num_layers=1)
    fd.convert(model, NEAR)
    want = step(model, name)
    model.compile(backend="aot_eager" if name == "Wan" else "eager", fullgraph=True)
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
        attention(x, encoder_hidden_states=x.clone())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_unknown_processors_and_other_backends_are_refused() -> None:
    """Before a conversion, in the report; after it, by the call."""

    class Mine:
        def __call__(self, attn, hidden_states, *args, **options):
            return hidden_states

    model = model_of("Stable Diffusion 3")
    model.transformer_blocks[1].attn.set_processor(Mine())
    report = fd.convert(model, NEAR)
    (left,) = report.left
    assert (left.name, left.kind) == ("transformer_blocks.1.attn", "diffusers.Attention")
    assert left.reason.startswith("its processor is Mine, which convert does not know")
    model.transformer_blocks[0].attn.set_processor(Mine())
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn has the processor Mine, which convert does not"):
        output(model, "Stable Diffusion 3")
    model = model_of("Wan")
    fd.convert(model, NEAR)
    said = re.escape('write model.set_attention_backend("native"), or give convert')
    with torch.no_grad(), diffusers().attention_backend("flex"), pytest.raises(ValueError, match=said):
        output(model, "Wan")
    assert output(model, "Wan").isfinite().all()
