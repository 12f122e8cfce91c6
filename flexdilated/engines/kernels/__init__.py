"""Kernels of torch that compute one part, a file for each family of devices."""
