"""Clients that break rules, lie about lengths, never read, never finish: what they cost is theirs alone."""
