"""The pipeline's jobs, one file each."""
