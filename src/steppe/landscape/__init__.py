"""The weight loss landscape (SPEC section 8): profiles along filter-normalised random directions, what they say about
flatness, and the terms of the paper's PAC-Bayes bound.
"""
