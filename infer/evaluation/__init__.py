"""Evaluation of models: benchmarks, judges, speed measurements, figures and reports."""
