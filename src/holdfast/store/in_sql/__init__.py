"""What the stores that speak SQL have in common: metadata, the lake's manifest, and how staged blocks are placed."""
