"""Training programs: a task is one class, and everything else that such a program needs is here.

In the order of their imports:

- methods: the algorithms and topologies that can be chosen by name.
- options: the options that all programs share.
- task: the protocol of a task.
- plan: from options to runs: steps, learning rate, optimizer, method.
- placement: where nodes run.
- output: the files of a run, and what a resumed one must keep to.
- trainer, evaluation, train: a run.
- asynchronous, asynchronous_job: runs of asynchronous nodes.
- main: `run_program`, the `main` of every training program: its checks before training, its runs
  one after the other, and its report.
"""
