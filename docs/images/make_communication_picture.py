"""Draw communication.png beside this file: what 8 ranks send each other for LongNet at a million tokens.

Run from a checkout with the extra `plot` installed: python docs/images/make_communication_picture.py
"""

from pathlib import Path

import torch

from flexdilated import masks
from flexdilated.cli._simulation import all_gather_tokens
from flexdilated.cli._traffic_picture import save_traffic_picture
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._tokens import token_counts

RANKS, TOKENS, HEADS, HEAD_DIM = 8, 1 << 20, 8, 64
TOKEN_BYTES = 2 * HEAD_DIM * torch.bfloat16.itemsize  # a key and a value of one head

if __name__ == "__main__":
    powers = range(10)
    pattern = masks.longnet([2048 << power for power in powers], [1 << power for power in powers])
    sharding = Sharding(TOKENS, RANKS)
    needed = token_counts(pattern, sharding, num_heads=HEADS, num_kv_heads=HEADS)
    gathered = all_gather_tokens(torch.tensor(sharding.lengths), num_kv_heads=HEADS)
    save_traffic_picture(
        Path(__file__).with_name("communication.png"),
        {"exchange": TOKEN_BYTES * needed, "all-gather": TOKEN_BYTES * gathered},
        title="LongNet, segments 2K to 1M at rates 1 to 512: keys and values between 8 ranks\n"
        f"1M tokens, {HEADS} heads, head dim {HEAD_DIM}, bfloat16",
    )
