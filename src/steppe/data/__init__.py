"""Data sets (bundled and downloaded), tasks, and the forms in which users' own data is accepted."""
