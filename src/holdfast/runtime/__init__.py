"""The host: the only place with sockets, tasks and clocks. It performs what the machines decide."""
