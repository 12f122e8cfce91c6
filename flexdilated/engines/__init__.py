"""What computes attention: a plan made ready for a device, its operands, gathering and merging, ops, the reference."""
