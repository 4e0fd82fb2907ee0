"""Training programs: a task is one class, and everything else that such a program needs is here.

In the order of a run:

- main: `run_program`, the `main` of every training program: parses, checks before training, starts
  run after run, and reports.
- options: what all programs share; task: the protocol of a task, such as `experiments.image`.
- placement: where the nodes run. plan: from options to runs: steps, learning rate, optimizer.
- methods, topologies: the algorithms and graphs that can be chosen by name.
- output: the files of a run, and what a resumed one must keep to.
- train: the loop; trainer: its compiled programs; evaluation: of the average model and the nodes'.
- asynchronous, asynchronous_job: runs of asynchronous nodes, in the place of train.
"""
