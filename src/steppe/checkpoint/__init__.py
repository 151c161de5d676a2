"""Trees of plain values, and the files they are saved in."""
