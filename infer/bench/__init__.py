"""What decoding and serving cost, measured: passes, answers, load.

Its own: benchmarks, load on a server, serial mode on the same content. It may touch the engine.
"""
