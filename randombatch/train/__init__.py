"""Training: configuration, mini-batches, the loop, checkpoints, jobs of several runs."""
