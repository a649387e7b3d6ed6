"""The members' side of a group: agents with their borrowers, and batch members."""
