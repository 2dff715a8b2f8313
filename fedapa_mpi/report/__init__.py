"""Tables over finished runs: mean and standard deviation over seeds."""
