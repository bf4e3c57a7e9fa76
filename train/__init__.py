"""Training: records, batches, loss, step and loop."""
