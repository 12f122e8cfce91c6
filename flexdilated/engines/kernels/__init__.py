"""Attention kernels: ATen's on CPU and CUDA, and one in plain torch operations for any device."""
