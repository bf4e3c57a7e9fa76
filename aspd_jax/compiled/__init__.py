"""Programs compiled for accelerators that are not there, and read: memory, traffic, collectives, bounds on time.

Figures are computed from compiled programs, never measured.
"""
