"""ASPD over servers that know nothing of it: serial segments as they come, and a request of its own for every branch.

Its own: what the upstream is asked, and how an answer is put together from what it says. It may touch events and deltas
of answers, and what clients send; no model and no engine.
"""
