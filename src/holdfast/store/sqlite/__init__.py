"""A store in one SQLite file: the log, metadata, staging and manifest of one node, and of any number of readers."""
