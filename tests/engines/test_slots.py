"""Slots and tokens, each read where the other holds it: against plain indexing, in values and gradients; and merges."""

from __future__ import annotations

import pytest
import torch

from flexdilated import masks
from flexdilated.engines._merge import merge
from flexdilated.engines.flex._flex_op import allowed_on
from flexdilated.engines.flex._program import make_flex_program
from flexdilated.engines.flex._slots import SlotIndex, _by_index
from flexdilated.masks import Layout
from flexdilated.masks.planning import plan
from tests.support.ladders import LONGNET_5

CPU = torch.device("cpu")

# B batch, X heads of a tensor, H heads of a term, N tokens, S slots, D head dim


def test_what_is_in_order_is_not_moved():
    x = torch.randn(1, 4, 6, 3)
    assert _by_index(torch.arange(6)[None], None, 4, 1, 6, CPU).slots.take(x, SlotIndex(), 0, 6) is x
    grouped = _by_index(torch.arange(6).expand(4, -1), None, 4, 2, 6, CPU)
    assert grouped.slots.take(x[:, :2], grouped.rows, 0, 6).shape == (1, 2, 6, 3)


def test_sums_over_terms_are_kept_wide():
    """Many small parts beside a large one: bfloat16 would lose them."""
    parts = [torch.full((1, 1, 4, 2), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 64)]
    out, _ = merge([(part, torch.zeros(1, 1, 4)) for part in parts])
    assert torch.equal(out, torch.full_like(out, 320 / 65))


@pytest.mark.parametrize("pattern", [masks.longnet(*LONGNET_5), masks.longnet(*LONGNET_5) & masks.causal()])
def test_a_million_tokens_hold_little(pattern):
    """All that a call keeps on an accelerator, tables included, is small beside q: 2 GiB in bfloat16."""
    N, H = 1 << 20, 8
    bound = pattern.bind(num_heads=H, num_queries=N, num_keys=N)
    chosen = plan(bound, device="cuda", allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": H, "block_size": (128, 128), "device": torch.device("meta")}
    program = make_flex_program(chosen, Layout(N), **options)
    assert program.nbytes < (2 << 30) / 256
    assert sum(step.nbytes for step in program.steps) < 1 << 12
