"""Benchmarks of decoding steps and whole answers."""
