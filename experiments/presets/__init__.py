"""The recipes and figures of published rows, by name; `python -m experiments.presets` lists them.

A file per paper. A preset is a value, and `--preset NAME` makes its options the defaults of its
program. Small ones, `mini`, compare the same methods in minutes on two cores.
"""
