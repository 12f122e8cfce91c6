"""Models of text and images, whole: the vision tower too, and tokens of one image that see each other."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.cases.transformers import tiny_config, tiny_model
from flexdilated import masks
from flexdilated.integrations.transformers import attention_layers, set_pattern

WINDOW = masks.local_window(left=2, right=0)
IMAGE, TEXT = 92, 90  # the token of a place in an image, and how many others there are


def _gemma() -> Any:
    """The tokens of an image see each other, across a window's border, too."""
    return tiny_model("gemma3", "Gemma3ForConditionalGeneration", mm_tokens_per_image=4).eval()


def _llava(**options: Any) -> Any:
    return tiny_model("llava", "LlavaForConditionalGeneration", **options).eval()


def _pixtral(heads: int = 4) -> Any:
    """Its tower masks the patches of different images by itself, so the tower is left to transformers."""
    tower = tiny_config("pixtral", num_attention_heads=heads, head_dim=32 // heads)
    return _llava(vision_config=tower, vision_feature_layer=-1, vision_feature_select_strategy="full")


MODELS = {"gemma3": (_gemma, 4), "llava": (_llava, 16), "pixtral": (_pixtral, 16)}
LEFT = (
    "model.vision_tower keeps the attention of transformers, and only the other layers get patterns: "
    "model.vision_tower, PixtralVisionModel, computes with a mask of queries and keys, which flexdilated does not make"
)
leaves_the_tower = pytest.mark.filterwarnings("ignore:model.vision_tower keeps the attention of transformers")


def batch_of(name: str) -> dict[str, Tensor]:
    """Two rows of text around an image; the second begins with padding."""
    generator, places = torch.Generator().manual_seed(1), MODELS[name][1]
    ids = torch.randint(1, TEXT, (2, 12 + places), generator=generator)
    ids[:, 5 : 5 + places] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    found = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels.double()}
    if name == "pixtral":
        found["image_sizes"] = torch.tensor([[32, 32], [32, 32]])
    return found | ({"token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else {})


@leaves_the_tower
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_equal_sdpa(name) -> None:
    # In float64: gradients of Gemma's projector reach 2,000, of which float32 has too few digits.
    model, batch = MODELS[name][0]().double(), batch_of(name)
    found = []
    for implementation in ("sdpa", "flexdilated"):
        if implementation == "sdpa":
            model.set_attn_implementation("sdpa")
        else:
            set_pattern(model, {})
        model.zero_grad()
        logits = model(**batch).logits[batch["attention_mask"].bool()]
        logits.logsumexp(-1).sum().backward()
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        tokens = model.generate(**batch, max_new_tokens=6, do_sample=False)
        found.append((logits.detach(), gradients, tokens))
    (want, slopes, text), (logits, gradients, tokens) = found
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients, slopes, rtol=1e-10, atol=1e-10)
    assert torch.equal(tokens, text)


@torch.no_grad()
def test_the_tower_and_the_text_get_patterns_of_their_own() -> None:
    """A window in the tower, another rule in the text: what each layer of them changes is seen in the logits."""
    model, batch = _llava(), batch_of("llava")
    set_pattern(model, {})
    whole = model(**batch).logits
    towers = {number for number, each in enumerate(attention_layers(model)) if "CLIP" in type(each).__name__}
    assert towers == {0, 1}
    near = masks.neighborhood((4, 4), 1).after(1) | masks.global_tokens(1)
    set_pattern(model, dict.fromkeys(towers, near))
    seen = model(**batch).logits
    assert (seen - whole)[:, :5].abs().max() == 0  # before the image
    assert (seen - whole)[:, 5:].abs().max() > 1e-4
    set_pattern(model, {number: masks.every() for number in range(4)})
    torch.testing.assert_close(model(**batch).logits, whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_tower_that_cannot_be_served_is_left_and_the_text_is_served() -> None:
    model, batch = _pixtral(), batch_of("pixtral")
    dense = model(**batch).logits
    towers = model.config.vision_config
    for pattern in ({}, {2: WINDOW}, lambda layer: WINDOW, WINDOW):
        with pytest.warns(UserWarning, match=re.escape(LEFT)) as warned:
            set_pattern(model, pattern)
        assert [each.filename for each in warned] == [__file__]
        assert (towers._attn_implementation, model.config.text_config._attn_implementation) == ("sdpa", "flexdilated")
        assert not hasattr(towers, "flexdilated_patterns")
        changed = (model(**batch).logits - dense).abs().max()
        assert changed < 1e-5 if pattern == {} else changed > 1e-3
    with pytest.raises(
        ValueError, match=r"layer 1 keeps the attention of transformers, so it takes no pattern: model\.v"
    ):
        set_pattern(model, {1: WINDOW, 2: WINDOW})
