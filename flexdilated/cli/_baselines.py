"""Byte-unigram and byte-bigram models: what a language model has to beat."""

from __future__ import annotations

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

_BYTES = 256


def unigram_bits(train: UInt8[Tensor, " n"], windows: UInt8[Tensor, "w m"]) -> float:
    """Bits per byte of each window's bytes after the first, under the byte frequencies of `train`."""
    return float(-_unigram(train).log2()[windows[:, 1:].long()].mean())


def bigram_bits(train: UInt8[Tensor, " n"], windows: UInt8[Tensor, "w m"]) -> float:
    """Bits per byte of each window's bytes after the first, each given the byte before it in the window.

    Pairs are counted in `train`, with one pseudo-count for each first byte, spread as the unigram has it.
    """
    pairs = train[:-1].long() * _BYTES + train[1:].long()
    counts = torch.bincount(pairs, minlength=_BYTES**2).double().view(_BYTES, _BYTES)
    smoothed = counts + _unigram(train)
    bits = -(smoothed / smoothed.sum(dim=1, keepdim=True)).log2()
    return float(bits[windows[:, :-1].long(), windows[:, 1:].long()].mean())


def _unigram(train: UInt8[Tensor, " n"]) -> Float64[Tensor, " byte"]:
    """Frequencies, each byte counted once more than it occurs so that none is impossible."""
    counts = torch.bincount(train.long(), minlength=_BYTES).double() + 1
    return counts / counts.sum()
