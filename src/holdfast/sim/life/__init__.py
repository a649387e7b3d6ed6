"""The life of sessions in virtual time: several nodes, one table of rows, clients that come, go and never come back."""
