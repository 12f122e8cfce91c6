"""Draw mask.png beside this file: one head of a small causal LongNet, in natural and in residue order.

Run from a checkout with the extra `plot` installed: python docs/images/make_mask_picture.py
"""

from pathlib import Path

from flexdilated import masks

if __name__ == "__main__":
    figure = masks.plot(
        masks.longnet(segment_lengths=(16, 64, 256), dilation_rates=(1, 2, 4)) & masks.causal(),
        256,
        num_heads=4,
        order=("natural", "residue"),
        block_size=4,
        title="LongNet, segments 16, 64, 256 at rates 1, 2, 4, causal",
    )
    figure.savefig(Path(__file__).with_name("mask.png"))
