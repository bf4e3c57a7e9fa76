"""Answers as users see them: read off the decoding state, as text, structure, events and log probabilities.

Its own: `Result`, `Event` and what makes them. It may touch `infer.decode`.
"""
