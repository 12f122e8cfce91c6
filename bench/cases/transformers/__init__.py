"""Every family of transformers as a tiny model with random weights: its config made small, and inputs that fit it."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH, LENGTH, VOCABULARY = 2, 20, 99
_MOST_PARAMETERS = 8_000_000

# A family is built as the first class that it has.
_KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "encoder-decoder": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
    "vision": "IMAGE_CLASSIFICATION",
    "audio": "CTC",
    "audio classes": "AUDIO_CLASSIFICATION",
    "image and text": "IMAGE_TEXT_TO_TEXT",
}
_ALWAYS = ("causal", "masked", "encoder-decoder", "speech")

# The first word that a name ends with or equals decides.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "projection_dim", "out_hidden_size", "output_dim", "hidden_dim"), 32),
    **dict.fromkeys(("n_heads", "num_heads", "n_head", "num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "mlp_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_proj_dim", "mlp_hidden_size"), 48),
    **dict.fromkeys(("n_layers", "n_layer", "num_layers", "num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "head_dim", "d_kv", "attention_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"), 128),
    **dict.fromkeys(("max_source_positions",), 64),
    **dict.fromkeys(("num_mel_bins",), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_chunk_size", "local_attention"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("index_topk", "index_block_size"), 6),  # fewer keys than a test has tokens
    **dict.fromkeys(("index_n_heads", "index_topk_blocks", "index_kpool"), 2),
    **dict.fromkeys(("index_head_dim",), 16),
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_LAYERS = {name for name, size in _SIZES.items() if "layers" in name or name in ("n_layer", "depth")}

# Made for the family's own number of layers or channels: the config makes them anew.
_DROPPED = ("per_layer_config", "out_features", "out_indices", "num_attention_heads_per_layer", "kv_source_layers")

# Their positions have three axes, each with its share of a head.
_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm46v", "glm_ocr", "glm_image", "paddleocr")

_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma3n_text": {"intermediate_size": 48},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"num_hidden_layers": 8},
    "deepseek_v2": {"topk_method": "greedy"},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
                        "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
                        "swa_qk_rope_head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "xlnet": {"d_head": 8},
}  # fmt: skip


def families() -> Iterator[tuple[str, str, str]]:
    """(model type, kind, class name) of each family that a class of the auto classes is made for."""
    seen: set[str] = set()
    for kind, mapping in _KINDS.items():
        for model_type, name in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            if model_type not in seen or kind in _ALWAYS:
                seen.add(model_type)
                yield model_type, kind, name if isinstance(name, str) else name[0]
    for model_type, name in auto.MODEL_MAPPING_NAMES.items():
        if model_type not in seen:
            yield model_type, "base", name if isinstance(name, str) else name[0]


def tiny_config(model_type: str, **options: Any) -> Any:
    """The family's config with small sizes, without dropout; options change it."""
    made = CONFIG_MAPPING[model_type]
    return made.from_dict({**_shrunk(made().to_dict()), **_MORE.get(model_type, {}), **options})


def _shrunk(whole: dict[str, Any]) -> dict[str, Any]:
    num_layers = next((whole[name] for name in _LAYERS if isinstance(whole.get(name), int)), None)
    small: dict[str, Any] = {}
    for name, value in whole.items():
        if isinstance(value, dict) and ("model_type" in value or "hidden_size" in value):
            small[name] = _shrunk(value)
        elif isinstance(value, list) and value and isinstance(value[0], str) and len(value) == num_layers:
            kinds = list(dict.fromkeys(value))
            small[name] = [kinds[i % len(kinds)] for i in range(max(2, len(kinds)))]
        elif name in _DROPPED:
            continue
        elif isinstance(value, float) and ("drop" in name or name.endswith("mask_time_prob")):
            small[name] = 0.0
        elif name in _SPECIAL:
            small[name] = _SPECIAL[name]
        elif isinstance(value, bool) or not isinstance(value, int) or not value:
            small[name] = value
        elif name in ("num_key_value_heads", "n_head_kv", "num_kv_heads"):
            heads = next((whole[each] for each in ("num_attention_heads", "n_head") if each in whole), value)
            small[name] = 4 if value == heads else min(value, 2)
        elif "vocab_size" in name:
            small[name] = VOCABULARY
        elif name.endswith("_token_id") or name.endswith("_token_index"):
            small[name] = value if value < VOCABULARY else VOCABULARY - 1 - sum(map(ord, name)) % 20
        else:
            small[name] = min(value, _SIZES[name]) if name in _SIZES else value
    rope, family = small.get("rope_parameters"), small.get("model_type", "")
    if isinstance(rope, dict) and "num_attention_heads" in small and family.startswith(_AXES):
        size = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
        half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        small["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    lists = [len(v) for k, v in small.items() if isinstance(v, list) and k.endswith("types")]
    if lists:
        small.update({name: max(lists) for name in _LAYERS & small.keys() if isinstance(small[name], int)})
    return small


def tiny_model(model_type: str, class_name: str, kind: str = "base", **options: Any) -> Any:
    """The family's model in training mode, the same at each call."""
    config, made = tiny_config(model_type, **options), getattr(transformers, class_name)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # BERT as a decoder
    config._attn_implementation = "sdpa" if made._supports_sdpa else "eager"
    with torch.device("meta"):
        size = sum(x.numel() for x in made(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return made(config)


def liven(model: nn.Module) -> None:
    """Larger matrices, so that attention is far from uniform."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() == 2 and "A_log" not in name:
                x.normal_(0, 1 / x.shape[-1] ** 0.5)


def inputs_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """Batches that may fit, the likelier first."""
    takes = inspect.signature(model.forward).parameters
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 70, (BATCH, LENGTH), generator=random)
    if "input_ids" in takes:
        batch = {"input_ids": ids}
        if "decoder_input_ids" in takes:
            batch["decoder_input_ids"] = ids[:, :12]
        yield batch
    side, channels = _number(model, "image_size", 32), _number(model, "num_channels", 3)
    for name, shapes in {
        "pixel_values": [(BATCH, channels, side, side), (BATCH, 4, channels, side, side)],
        "input_features": [(BATCH, 16, 128), (BATCH, 128, 16), (BATCH, 128, 160)],
        "input_values": [(BATCH, 4000), (BATCH, 1, 4000), (BATCH, 128, 128)],
    }.items():
        for shape in shapes if name in takes else []:
            batch = {name: torch.randn(shape, generator=random)}
            if "decoder_input_ids" in takes:
                batch["decoder_input_ids"] = ids[:, :12]
            yield batch


def _number(model: Any, name: str, otherwise: int) -> int:
    """Of the config, or of the first config within that has it."""
    inner = (value for value in vars(model.config).values() if hasattr(value, "model_type"))
    found = (getattr(config, name, None) for config in (model.config, *inner))
    return next((value for value in found if isinstance(value, int)), otherwise)
