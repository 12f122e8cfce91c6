"""Orders of tokens: residue-major, tiled over a grid, placed over ranks."""
