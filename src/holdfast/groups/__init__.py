"""Shared groups: a durable subscription that many members consume together."""
