"""The exchange: every rank receives the keys that its queries need, and no others, in one all-to-all.

The plan says which rows, the call moves them and attends, the op is what autograd and torch.compile see.
"""

from ._op import exchange

__all__ = ["exchange"]
