"""The engine of tiles: the terms of a plan as calls of dense kernels."""
