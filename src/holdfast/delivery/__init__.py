"""What brings committed messages to sessions: who is live, who is behind, who has room; pure, driven by its host."""
