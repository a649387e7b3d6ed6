"""Fan-out in virtual time: the dispatchers and campaigns of several nodes over one store, with faults and checkers."""
