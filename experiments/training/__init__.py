"""What all training programs share. A task is one class; this folder does everything else.

The files, in the order in which a run needs them:

- main: `run_program`, the `main` of every training program, parses options, checks them before
  training, starts run after run, and reports.
- options: the options that all programs share. task: the protocol of a task, which for example
  `experiments.image` implements.
- placement: chooses the devices of the nodes. plan: makes runs from options, with steps, learning
  rate and optimizer.
- methods, topologies: the algorithms and graphs that you can choose by name.
- output: the files of a run, and which options a resumed run must keep.
- train: the training loop. trainer: its compiled programs. evaluation: evaluates the average model
  and the models of the nodes.
- asynchronous, asynchronous_job: replace train for asynchronous nodes.
"""
