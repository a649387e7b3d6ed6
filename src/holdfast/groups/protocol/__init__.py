"""What machines of a group say: nouns, messages to each other, events and effects between them and their host."""
