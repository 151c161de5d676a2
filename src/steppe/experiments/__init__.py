"""Runs and studies: configuration, execution, directories, resuming."""
