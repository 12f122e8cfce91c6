"""attention-gym's masks against ours, where both libraries have the same one.

Source: https://github.com/meta-pytorch/attention-gym, the package attn-gym.
"""

import pytest
import torch
from attn_gym import masks as gym
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from flexdilated import masks

FIRST_FIVE = torch.arange(200) < 5

# Their windows count tokens to each side, dilated or not; a sliding window looks back only.
SAME = {
    "causal": (masks.causal(), gym.causal_mask),
    "sliding window": (
        masks.local_window(left=3, right=200) & masks.causal(),
        gym.generate_sliding_window(3),
    ),
    "dilated sliding window": (
        masks.dilated_window(left=4, right=4, rate=3),
        gym.generate_dilated_sliding_window(12, 3),
    ),
    "dilated sliding window, a ragged end": (
        masks.dilated_window(left=4, right=4, rate=3),
        gym.generate_dilated_sliding_window(14, 3),
    ),
    "dilated sliding window of rate 1": (
        masks.dilated_window(left=7, right=7, rate=1),
        gym.generate_dilated_sliding_window(7, 1),
    ),
    "global sliding window": (
        masks.local_window(left=2, right=2) | masks.global_tokens(5),
        gym.generate_global_sliding_window(2, FIRST_FIVE),
    ),
    # A square, where what attention-gym calls the width of its canvas is that of both axes.
    "neighborhood": (masks.neighborhood((15, 15), (3, 1)), gym.generate_natten(15, 15, 7, 3)),
    "prefix language model": (masks.prefix_lm(6), gym.generate_prefix_lm_mask(6)),
}
SIZES = [(1, 1), (5, 5), (33, 33), (200, 200), (17, 64), (64, 17)]


@pytest.mark.parametrize(("num_queries", "num_keys"), SIZES)
@pytest.mark.parametrize("name", SAME)
def test_same_pairs(name, num_queries, num_keys):
    ours, theirs = SAME[name]
    bound = ours.bind(num_heads=1, num_queries=num_queries, num_keys=num_keys)
    sizes = (1, 1, num_queries, num_keys, "cpu")
    assert torch.equal(create_mask(bound.mask_mod(), *sizes), create_mask(theirs, *sizes))


@pytest.mark.parametrize("name", SAME)
def test_same_blocks(name):
    """Ours from closed forms, theirs from every pair: the same blocks, and the same ones full."""
    ours, theirs = SAME[name]
    found = masks.block_mask(ours, 200, num_heads=1, block_size=16)
    expected = create_block_mask(theirs, 1, 1, 200, 200, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.full_kv_num_blocks is not None
    assert expected.full_kv_num_blocks is not None
    assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)
