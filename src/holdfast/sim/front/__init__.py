"""The path of a message under the simulator: connections, sessions, delivery and loans, in virtual time."""
