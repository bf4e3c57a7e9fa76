"""Training: synthetic tasks, batches, loss, step and loop."""
