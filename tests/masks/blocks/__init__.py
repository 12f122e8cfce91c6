"""Block lists and BlockMasks."""
