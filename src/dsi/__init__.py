"""Distributed speculative inference: lossless decoding that never takes turns."""

__version__ = "0.1.0"
