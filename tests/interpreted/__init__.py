"""Kernels made for an H200, in Triton's interpreter and as compiled code: `make test-kernels`."""
