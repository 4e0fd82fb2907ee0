"""Results of programs: their folders and files, and the checks of files that are read again."""

from experiments.results.files import (
    AFTER_MIXING,
    BEFORE_MIXING,
    LOSS,
    Curves,
    Record,
    create_run_dir,
    filter_metrics,
    find_metrics,
    group_by_label,
    make_progress_bar,
    metric_fields,
    read_runs,
    read_summary,
    write_summary,
)

__all__ = [
    "AFTER_MIXING",
    "BEFORE_MIXING",
    "LOSS",
    "Curves",
    "Record",
    "create_run_dir",
    "filter_metrics",
    "find_metrics",
    "group_by_label",
    "make_progress_bar",
    "metric_fields",
    "read_runs",
    "read_summary",
    "write_summary",
]
