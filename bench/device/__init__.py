"""Measures for an accelerator: correctness first, then every row. `python -m bench.device`, or bench/h200.sh."""
