"""A store in this process's memory, for trials and tests: every promise but the disk's."""
