"""The leader's side of a group: who leads, who sits where, what is lent to whom."""
