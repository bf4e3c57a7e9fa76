"""Decoding without a server: JSONL batches with a resumable journal, and output on a terminal."""
