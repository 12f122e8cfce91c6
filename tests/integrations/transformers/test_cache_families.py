"""FlexdilatedCache for layers that share keys, attend twice, or hold states; and the families that need another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern

from .models import tokens
from .tiny import tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Two layers read the keys of two others; one of each pair has a window.
    "gemma3n_text": (
        "Gemma3nForCausalLM",
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}),  # caps scores
    "diffllama": ("DiffLlamaForCausalLM", {"num_key_value_heads": 2}),  # attends twice, with the halves of its values
    "qwen3_next": ("Qwen3NextForCausalLM", {}),  # linear attention beside
    "lfm2": ("Lfm2ForCausalLM", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "falcon_h1": ("FalconH1ForCausalLM", {"mamba_chunk_size": 8}),  # Mamba and attention in each layer
}
PATTERNS = {"none": {}, "window": masks.local_window(left=5, right=0), "longnet": masks.longnet((4, 32), (1, 4))}


def model_of(name: str) -> Any:
    """With weights so large that the next token depends on all that is seen."""
    class_name, options = FAMILIES[name]
    made = tiny_model(name, class_name, "causal", **options).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return made


def written(model: Any, cache: Any = None, **options: Any) -> torch.Tensor:
    return model.generate(tokens(), past_key_values=cache, max_new_tokens=10, do_sample=False, **options)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_are_those_of_the_model(name: str, pattern: str) -> None:
    """Without a pattern those that the model writes with its own attention; with one those of whole passes."""
    model = model_of(name)
    own = written(model)
    set_pattern(model, PATTERNS[pattern])
    want = own if pattern == "none" else written(model, use_cache=False)
    assert torch.equal(written(model, FlexdilatedCache(model.config, undo=0)), want)
    if pattern == "longnet":
        assert torch.equal(written(model, FlexdilatedCache(model.config), num_beams=2), written(model, num_beams=2))


@torch.no_grad()
@pytest.mark.parametrize("wide", [1, 3])
def test_layers_that_share_keys_have_rules_of_their_own(wide: int) -> None:
    """The reader that sees more comes first, or last: keys are kept for both."""
    model, narrow = model_of("gemma3n_text"), masks.local_window(left=3, right=0)
    set_pattern(model, {wide: masks.local_window(left=300, right=0), 4 - wide: narrow, 0: narrow, 2: narrow})
    rows = tokens(1, 50).repeat(1, 16)
    want, cache = model(rows, use_cache=False).logits, FlexdilatedCache(undo=0)
    found = [model(part, past_key_values=cache).logits for part in rows.split([60] * 13 + [1] * 20, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=0, atol=1e-4)
    assert [layer.num_tokens for layer in cache.layers] == [800, 800]
    assert cache.layers[0].keys.shape[2] < 400


def test_families_that_need_another_cache() -> None:
    """Each says which."""
    model = model_of("qwen3_next")
    set_pattern(model, {})
    with pytest.raises(ValueError, match=r"states of linear attention .*: FlexdilatedCache\(model\.config\)"):
        written(model, FlexdilatedCache())
    model = tiny_model("deepseek_v3", "DeepseekV3ForCausalLM", "causal").eval()
    set_pattern(model, {})
    with pytest.raises(ValueError, match=r"from latents, leave the cache to transformers, a DynamicCache"):
        written(model, FlexdilatedCache())
    assert torch.equal(written(model, DynamicCache()), written(model, use_cache=False))
    with pytest.raises(ValueError, match=r"the model needs a DynamicIndexedLayer\. Leave the cache to transformers"):
        FlexdilatedCache(tiny_config("deepseek_v32"))


@pytest.mark.parametrize("length", [20, 1])
def test_an_encoder_decoder(length: int) -> None:
    """Its self-attention takes the cache; alone it is refused, whatever the number of encoder tokens."""
    model = tiny_model("bart", "BartForConditionalGeneration", "encoder-decoder").eval()
    set_pattern(model, {})
    row, options = tokens()[:, :length], {"max_new_tokens": 9, "do_sample": False}
    want = model.generate(row, **options)
    found = model.generate(row, past_key_values=EncoderDecoderCache(FlexdilatedCache(), DynamicCache()), **options)
    assert torch.equal(found, want)
    with pytest.raises(ValueError, match=r"give EncoderDecoderCache\(FlexdilatedCache\(\), DynamicCache\(\)\)"):
        model.generate(row, past_key_values=FlexdilatedCache(), **options)
