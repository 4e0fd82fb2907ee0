"""The programs of the trainers import their trainer: pytest does not look for doctests in them."""

collect_ignore_glob = ["*_program.py"]
