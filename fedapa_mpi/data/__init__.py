"""What clients learn from: data sets, partitions, shards."""
