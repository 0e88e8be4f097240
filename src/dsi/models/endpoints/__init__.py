"""Inference engines behind URLs: their addresses, and what is sent to and read from each kind. No I/O."""
