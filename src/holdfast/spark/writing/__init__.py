"""Writing to the log with Spark: rows become blocks, tasks stage them, the driver publishes them at once."""
