"""Cache operations: support checks, checkpoints, forks."""
