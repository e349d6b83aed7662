"""The worker: rows, batches, the forward pass and sampling on one device."""
