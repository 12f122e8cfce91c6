"""Attention over sequences that lie on many ranks, on torch.distributed."""

from ._traffic import Traffic, traffic

__all__ = ["Traffic", "traffic"]
