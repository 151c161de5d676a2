"""Data that travels with the package, and the forms in which a user's own data is accepted."""
