"""SGP-19: accuracy of the methods over nodes, epochs and time, and the nodes' distances.

- grid: the calls of the image program that the sections share, and where each method is in them.
- readings: accuracies and training losses from the runs; texts of claims and cells of tables.
- task: what is trained, in words.
- table1 (with Figure 1), figure2, table3, table4, table5: a section each.
"""
