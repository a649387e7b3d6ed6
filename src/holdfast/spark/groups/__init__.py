"""Reading as a member of a shared group: what a query's driver is lent, micro-batch by micro-batch."""
