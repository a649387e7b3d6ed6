"""HTTP: parse, call, show; no logic of its own."""
