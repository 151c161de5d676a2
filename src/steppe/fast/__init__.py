"""Faster ways to compute what plain PyTorch code computes elsewhere.

`STEPPE_FAST=0` turns them off (see `switch`); docs/performance.md describes each.
"""
