"""Ahead-of-time compilation of decoding and training steps for TPUs and GPUs that need not be present.

Memory and lower bounds of time are computed from the compiled programs, not measured.
"""
