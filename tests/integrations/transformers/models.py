"""Tiny models of transformers with random weights, a batch for each, and what is compared of a pass."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.cases.transformers import tiny_model
from flexdilated.integrations.transformers import register

VOCABULARY = 97
NUM_HEADS = 4
WINDOW = 16
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
_DECODER = {**_SIZES, "head_dim": 16, "num_key_value_heads": 2}
_SLIDING = {**_DECODER, "sliding_window": WINDOW}
_CHUNKED = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}


@dataclass(frozen=True)
class Family:
    """A type of models, the class, and what is not as in the tiny config."""

    model_type: str
    class_name: str
    options: dict[str, Any]
    inputs: str = "tokens"


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", _DECODER),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _DECODER),
    "mistral": Family("mistral", "MistralForCausalLM", _SLIDING),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _SLIDING),
    "gpt-oss": Family("gpt_oss", "GptOssForCausalLM", _SLIDING),
    "llama4": Family(
        "llama4_text",
        "Llama4ForCausalLM",
        {**_DECODER, **_CHUNKED, "num_hidden_layers": 4, "intermediate_size_mlp": 96},
    ),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_positions": 256}),
    "bert": Family("bert", "BertForMaskedLM", _SIZES),
    "modernbert": Family("modernbert", "ModernBertForMaskedLM", {**_SIZES, "local_attention": 2 * WINDOW}),
    "vit": Family("vit", "ViTForImageClassification", {**_SIZES, "num_labels": 5}, "pixels"),
    "whisper": Family(
        "whisper",
        "WhisperForConditionalGeneration",
        {"d_model": 64, "suppress_tokens": None, "begin_suppress_tokens": None},
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
    return tiny_model(family.model_type, family.class_name, **{**family.options, **options}).eval()


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
            return {"input_features": torch.randn(2, 16, 128, generator=random), "decoder_input_ids": tokens(length=20)}
    mask = torch.ones(2, 50, dtype=torch.long)
    if padding is not None:
        mask[1, {"left": slice(0, 17), "right": slice(33, None), "inside": slice(20, 24)}[padding]] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def real_logits(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """The logits of a pass, 0 for padding."""
    logits = model(**batch, **options).logits
    return logits * batch["attention_mask"][..., None] if "attention_mask" in batch else logits
