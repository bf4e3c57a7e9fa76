"""Answers as users see them: text, structure, events and log probabilities read from the decoding state."""
