"""What lasts: state, checkpoints, results, the folder of a run."""
