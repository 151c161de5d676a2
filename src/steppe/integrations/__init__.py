"""Thin adapters for other libraries; each file imports its own library, and nothing here imports them all."""
