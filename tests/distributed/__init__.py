"""Calls, modules and buffers over ranks."""
