"""Decoding on the device: pure, jitted functions of a `DecodeState`; from pending tokens to the next ones.

Its own: the state, what a pass feeds (`inputs`), what a sampled token does (`transition`), grammar, sampling, guesses,
and the loop of passes (`step`). It may touch `aspd_jax`, and nothing else of `infer`.
"""
