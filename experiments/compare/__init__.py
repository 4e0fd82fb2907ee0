"""A grid of runs in one command, and one table of them.

- grid: rows, columns and seeds; the command line of every cell.
- named: published tables, with their figures, and other grids that have names.
- statistics, tables: mean and spread over the seeds, as text, Markdown, LaTeX and CSV.
"""
