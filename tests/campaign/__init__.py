"""The fault campaign: real nodes under a seeded nemesis, and what their clients saw checked against the promises."""
