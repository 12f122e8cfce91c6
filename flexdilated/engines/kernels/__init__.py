"""ATen's attention kernels, on the CPU and on CUDA."""
