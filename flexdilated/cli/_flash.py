"""FlashAttention on this machine: which implementation PyTorch runs, and which others it could. Nothing is switched."""

from __future__ import annotations

import importlib.util

import torch.nn.attention

OWN = "FA2"  # what PyTorch is built with


def active_implementation() -> str:
    """The implementation behind PyTorch's flash attention on CUDA in this process."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current() if current else None) or OWN


def other_implementations() -> list[str]:
    """Those that `torch.nn.attention.activate_flash_attention_impl` knows by name, installed or not."""
    known = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    return known() if known else []


def is_flash_backend_importable() -> bool:
    """Whether FlexAttention finds the package of its FLASH backend, FlashAttention 4."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False  # no flash_attn at all
