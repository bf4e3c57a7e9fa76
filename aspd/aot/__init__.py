"""Ahead-of-time compilation for TPUs and GPUs that need not be present: memory, traffic, collectives, bounds on time.

Figures are computed from compiled programs, never measured. The package compiles the steps of `train` and `infer`, and
neither of them imports it.
"""
