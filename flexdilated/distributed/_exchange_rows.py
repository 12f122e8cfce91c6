"""The two transfers of an exchange: keys and values to those who need them, and their gradients back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ._codec import Codec
from ._faults import communicating
from ._pool import BufferPool, lease_from
from ._ranks import Ranks, group_of
from ._traffic import Role, record
from ._wires import Wires

# B batch, G key/value heads, L tokens of this rank's shard, M own and received tokens, D head dim
# S rows sent, R rows received


def bring_keys(
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    wires: Wires,
    ranks: Ranks,
    codec: Codec,
    pool: BufferPool | None,
) -> tuple[Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:
    """This rank's keys and values, and after them those of other ranks that its queries need."""
    own, wires = k.shape[2], wires.on(k.device)
    found = tuple(x.new_empty(*x.shape[:2], wires.num_keys, x.shape[3]) for x in (k, v))
    for whole, x in zip(found, (k, v), strict=True):
        whole[:, :, :own] = x
    rows = [x[:, wires.sent_heads, wires.sent_tokens] for x in (k, v)]
    sizes = wires.num_sent, wires.num_received
    with _swapped(rows, sizes, ranks, codec, pool, role="keys", what="the exchange of keys") as arrived:
        for whole, x in zip(found, arrived, strict=True):
            whole[:, wires.received_heads, wires.received_slots] = x
    return found[0], found[1]


def return_gradients(
    dk: Float[Tensor, "B G M D"],
    dv: Float[Tensor, "B G M D"],
    own: int,
    wires: Wires,
    ranks: Ranks,
    codec: Codec,
    pool: BufferPool | None,
) -> tuple[Float[Tensor, "B G L D"], Float[Tensor, "B G L D"]]:
    """The gradients of this rank's `own` keys and values, with what other ranks have found for them.

    They are added up in float32 or wider, and in the order of the ranks.
    """
    wide, wires = torch.promote_types(dk.dtype, torch.float32), wires.on(dk.device)
    totals = tuple(x[:, :, :own].to(wide, copy=True) for x in (dk, dv))
    rows = [x[:, wires.received_heads, wires.received_slots] for x in (dk, dv)]
    sizes = wires.num_received, wires.num_sent
    heads, tokens = (index.split(wires.num_sent) for index in (wires.sent_heads, wires.sent_tokens))
    with _swapped(rows, sizes, ranks, codec, pool, role="gradients", what="the exchange of gradients") as arrived:
        for total, x in zip(totals, arrived, strict=True):
            for head, token, part in zip(heads, tokens, x.split(wires.num_sent, dim=1), strict=True):
                total[:, head, token] += part  # a rank sends one row a token and head
    return totals[0], totals[1]


@contextmanager
def _swapped(
    rows: Sequence[Float[Tensor, "B S D"]],
    sizes: tuple[Sequence[int], Sequence[int]],
    ranks: Ranks,
    codec: Codec,
    pool: BufferPool | None,
    *,
    role: Role,
    what: str,
) -> Iterator[list[Float[Tensor, "B R D"]]]:
    """The rows that come for those of keys and of values that go, in one all-to-all; `sizes` are rows by rank."""
    batch, _, head_dim = rows[0].shape
    dtype, device = rows[0].dtype, rows[0].device
    each = (len(rows), batch, codec.row_bytes(head_dim, dtype))
    leases = [lease_from(pool, (sum(size), *each), torch.uint8, device, role=role) for size in sizes]
    try:
        sent, received = (lease.tensor for lease in leases)
        for place, x in enumerate(rows):
            codec.encode(x.transpose(0, 1), out=sent[:, place])
        with communicating(what, ranks):
            dist.all_to_all_single(received, sent, list(sizes[1]), list(sizes[0]), group=group_of(ranks.name))
        record(role, sent=sent.nbytes, received=received.nbytes)
        yield [codec.decode(received[:, place], head_dim, dtype).transpose(0, 1) for place in range(len(rows))]
    finally:
        for lease in leases:
            lease.release()
