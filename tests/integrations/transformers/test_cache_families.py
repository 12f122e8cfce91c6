"""FlexdilatedCache for layers that share keys, attend twice, or hold states; and the families that need another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, set_pattern

from .models import tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_LATENT: dict[str, Any] = {
    **{"num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "num_key_value_heads": 4},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Two layers read the keys of two others; one of each pair has a window.
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **{"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "num_hidden_layers": 4},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
            **{"sliding_window": 8, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
        },
    ),
    # Scores are capped.
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            **{"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
        },
    ),
    # A layer attends twice, with the halves of its values.
    "diffllama": ("DiffLlamaForCausalLM", "DiffLlamaConfig", {"num_hidden_layers": 2}),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
            **{**_EXPERTS, "shared_expert_intermediate_size": 16},
            **{"linear_num_value_heads": 2, "linear_num_key_heads": 2},
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    # Mamba and attention in each layer.
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", {"num_hidden_layers": 2, "mamba_chunk_size": 8, **_MAMBA}),
}
PATTERNS = {"none": {}, "window": masks.local_window(left=5, right=0), "longnet": masks.longnet((4, 32), (1, 4))}


def model_of(name: str) -> Any:
    """With weights so large that the next token depends on all that is seen."""
    model, config, options = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**_SIZES, **options})).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return made


def written(model: Any, cache: Any = None, **options: Any) -> torch.Tensor:
    return model.generate(tokens(), past_key_values=cache, max_new_tokens=16, do_sample=False, **options)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_are_those_of_the_model(name: str, pattern: str) -> None:
    """Without a pattern those that the model writes with its own attention; with one those of whole passes."""
    model = model_of(name)
    own = written(model)
    set_pattern(model, PATTERNS[pattern])
    want = own if pattern == "none" else written(model, use_cache=False)
    cache = FlexdilatedCache(model.config, undo=0)
    assert torch.equal(written(model, cache), want)
    assert torch.equal(written(model, cache.__class__(model.config), num_beams=2), written(model, num_beams=2))


@torch.no_grad()
@pytest.mark.parametrize("wide", [1, 3])
def test_layers_that_share_keys_have_rules_of_their_own(wide: int) -> None:
    """The reader that sees more comes first, or last: keys are kept for both."""
    model, narrow = model_of("gemma3n"), masks.local_window(left=3, right=0)
    set_pattern(model, {wide: masks.local_window(left=300, right=0), 4 - wide: narrow, 0: narrow, 2: narrow})
    rows = tokens(1, 50).repeat(1, 16)
    want, cache = model(rows, use_cache=False).logits, FlexdilatedCache(undo=0)
    found = [model(part, past_key_values=cache).logits for part in rows.split([60] * 13 + [1] * 20, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=0, atol=1e-4)
    assert [layer.num_tokens for layer in cache.layers] == [800, 800]
    assert cache.layers[0].keys.shape[2] < 400


def test_families_that_need_another_cache() -> None:
    """Each says which."""
    model = model_of("qwen3-next")
    set_pattern(model, {})
    with pytest.raises(ValueError, match=r"states of linear attention .*: FlexdilatedCache\(model\.config\)"):
        written(model, FlexdilatedCache())
    config = transformers.DeepseekV3Config(**{**_SIZES, **_LATENT})
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    set_pattern(model, {})
    with pytest.raises(ValueError, match=r"from latents, leave the cache to transformers, a DynamicCache"):
        written(model, FlexdilatedCache())
    assert torch.equal(written(model, DynamicCache()), written(model, use_cache=False))
    indexed = transformers.DeepseekV32Config(**{**_SIZES, **_LATENT})
    with pytest.raises(ValueError, match=r"the model needs a DynamicIndexedLayer\. Leave the cache to transformers"):
        FlexdilatedCache(indexed)


@pytest.mark.parametrize("length", [20, 1])
def test_an_encoder_decoder(length: int) -> None:
    """Its self-attention takes the cache; alone it is refused, whatever the number of encoder tokens."""
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = transformers.BartConfig(vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=2, **sizes)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    set_pattern(model, {})
    row, options = tokens()[:, :length], {"max_new_tokens": 9, "do_sample": False}
    want = model.generate(row, **options)
    found = model.generate(row, past_key_values=EncoderDecoderCache(FlexdilatedCache(), DynamicCache()), **options)
    assert torch.equal(found, want)
    with pytest.raises(ValueError, match=r"give EncoderDecoderCache\(FlexdilatedCache\(\), DynamicCache\(\)\)"):
        model.generate(row, past_key_values=FlexdilatedCache(), **options)
