"""Benchmarks of decoding steps, whole answers and a server under load."""
