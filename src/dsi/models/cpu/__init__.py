"""Forwards on CPUs in compiled kernels."""
