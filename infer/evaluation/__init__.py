"""How good and how fast answers are: benchmarks, judges, figures and reports.

Its own: the run of an evaluation. It may touch the engine, `infer.answers`, `infer.bench` and `infer.offline`.
"""
