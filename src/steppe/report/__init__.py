"""The report: finished runs as one self-contained HTML page.

`finished_run` reads the runs, `sections` groups those that may be compared, `differences` tests methods against each
other, `series` computes the numbers that the page's script plots, `markup` writes the tables, and `page` assembles the
file.
"""
