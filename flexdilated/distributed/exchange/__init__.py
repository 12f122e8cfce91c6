"""The exchange: every rank receives the keys that its queries need, and no others, in one all-to-all.

_plan: the rows to send. _call: their transfer, and attention. _op: the ops for autograd and torch.compile.
"""

from ._op import exchange

__all__ = ["exchange"]
