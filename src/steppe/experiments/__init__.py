"""Runs and studies: configuration, directories, resuming."""
