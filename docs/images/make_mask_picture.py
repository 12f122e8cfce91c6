"""Draw mask.png beside this file: one head of a small causal LongNet, in natural and in residue order.

Run from a checkout with the extra `demo` installed: python docs/images/make_mask_picture.py
"""

from pathlib import Path

from flexdilated import masks
from flexdilated.cli._mask_picture import save_mask_picture

if __name__ == "__main__":
    save_mask_picture(
        Path(__file__).with_name("mask.png"),
        masks.longnet(segment_lengths=(32, 128, 512), dilation_rates=(1, 2, 4)) & masks.causal(),
        num_tokens=512,
        num_heads=4,
        side=8,
        title="LongNet, segments 32, 128, 512 at rates 1, 2, 4, causal",
    )
