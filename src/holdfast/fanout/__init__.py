"""Fan-out: one payload to many vehicles, one at a time each, in order, until every one of them has an end."""
