"""The weight loss landscape (docs/landscapes.md): profiles along filter-normalized random directions, measures of
flatness, and the terms of the paper's PAC-Bayes bound.
"""
