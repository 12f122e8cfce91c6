"""The engine of FlexAttention: the terms of a plan as calls with block masks."""
