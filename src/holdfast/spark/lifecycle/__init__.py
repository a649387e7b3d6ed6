"""A Spark session from its start to its end: Java, settings, workers that are ready, and a quiet stop."""
