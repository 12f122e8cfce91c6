"""Tiny models of transformers with random weights, a batch for each, and what is compared of a pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from flexdilated.integrations.transformers import register

VOCABULARY = 97
NUM_HEADS = 4
WINDOW = 16
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_HEADS: dict[str, Any] = {**_DECODER, "head_dim": 16}
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


@dataclass(frozen=True)
class Family:
    """A model class, the class of its config, and the config."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: str = "tokens"


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": WINDOW}),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_HEADS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_HEADS,
            "sliding_window": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": NUM_HEADS, "n_positions": 256},
            **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", {**_SIZES, **_NO_DROPOUT}),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **_SIZES,
            "global_attn_every_n_layers": 2,
            "local_attention": 2 * WINDOW,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**_SIZES, **_NO_DROPOUT, "image_size": 32, "patch_size": 8, "num_labels": 5},
        "pixels",
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"vocab_size": VOCABULARY, "d_model": 64, "num_mel_bins": 8},
            **{"encoder_layers": 2, "encoder_attention_heads": NUM_HEADS, "encoder_ffn_dim": 96},
            **{"decoder_layers": 2, "decoder_attention_heads": NUM_HEADS, "decoder_ffn_dim": 96},
            **{"max_source_positions": 50, "max_target_positions": 64},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
            **{"suppress_tokens": None, "begin_suppress_tokens": None},
        },
        "sound",
    ),
}
DECODERS = ["llama", "qwen3", "mistral", "gemma3", "gpt-oss", "llama4", "gpt2"]


def model_of(name: str, **options: Any) -> Any:
    """A model of a family, the same at each call; options change its config. Built once, and copied."""
    return copy.deepcopy(_built(name, **options))


@cache
def _built(name: str, **options: Any) -> Any:
    register()
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**{**family.options, **options})
    return getattr(transformers, family.model)(config).eval()


@cache
def tokens(batch: int = 2, length: int = 50) -> Tensor:
    """Token ids without special ones."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def batch_of(name: str, padding: str | None = None) -> dict[str, Tensor]:
    """A batch of two; of token ids the second entry may be padded."""
    random = torch.Generator().manual_seed(2)
    match FAMILIES[name].inputs:
        case "pixels":
            return {"pixel_values": torch.randn(2, 3, 32, 32, generator=random)}
        case "sound":
            return {
                "input_features": torch.randn(2, 8, 100, generator=random),
                "decoder_input_ids": tokens(length=20),
            }
    mask = torch.ones(2, 50, dtype=torch.long)
    if padding is not None:
        mask[1, {"left": slice(0, 17), "right": slice(33, None), "inside": slice(20, 24)}[padding]] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def real_logits(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """The logits of a pass, 0 for padding."""
    logits = model(**batch, **options).logits
    return logits * batch["attention_mask"][..., None] if "attention_mask" in batch else logits
