"""Shared groups against real nodes: real processes, real clients, real crashes."""
