"""Reading the log with Spark: in batches and as a stream, ranges of offsets cut into partitions."""
