"""A training run: configuration, data, loop, log and weights."""
