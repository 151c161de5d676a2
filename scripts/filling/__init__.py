"""What scripts/fill_results.py writes: the marked places of documents, and the overview of all results."""
