"""An OpenAI-compatible server around the engine.

Its own: HTTP, limits, metrics, the thread that drives the engine. It may touch the engine, `infer.lockstep` and
`infer.answers`.
"""
