"""The weight loss landscape (docs/landscapes.md): profiles along filter-normalised random directions, what they say
about flatness, and the terms of the paper's PAC-Bayes bound.
"""
