"""Runs calls of programs, several side by side; what is finished is not run again.

- run: a call, and how it ended.
- devices: how many at a time, and the devices of each.
- processes: the processes of calls, which all end with the program that started them.
- folders: what a call leaves in its folder, and how its end is read from it.
- origin: the code and the machine of a call.
- side_by_side: the calls of a list.
"""

from experiments.runner.devices import Devices, find_devices
from experiments.runner.folders import LOG, STATE, is_run, judge, make_folder, take_runs
from experiments.runner.origin import find_commit, find_machine
from experiments.runner.run import Result, Run, Status
from experiments.runner.side_by_side import Reporter, find_result, run_all

__all__ = [
    "LOG",
    "STATE",
    "Devices",
    "Reporter",
    "Result",
    "Run",
    "Status",
    "find_commit",
    "find_devices",
    "find_machine",
    "find_result",
    "is_run",
    "judge",
    "make_folder",
    "run_all",
    "take_runs",
]
