"""One device: rows, batches, the forward pass, sampling."""
