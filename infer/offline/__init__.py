"""Answering files and terminals, without a server.

Its own: JSONL files, journals that survive kill -9, a terminal. It may touch the engine, `infer.answers` and
`infer.bench`.
"""
