"""The browser report: finished runs as one page that needs no network.

`collect` reads the files of runs, `sections` puts together what may be compared, `statistics` averages and compares,
`series` holds the numbers that the page's script draws, `markup` the tables that need no script, and `page` makes one
file of it all.
"""
