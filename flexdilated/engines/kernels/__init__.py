"""Attention kernels: ATen's on CPU and CUDA, one in torch operations, and Triton's over lists of single keys."""
