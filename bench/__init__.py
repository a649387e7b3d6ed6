"""Measurements, not tests: each prints the machine, the commit and the distribution with its figures."""
