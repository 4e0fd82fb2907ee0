"""Programs that import a trainer are imported by its test alone, as doctests import all modules."""

collect_ignore_glob = ["*_plain.py", "*_program.py"]
