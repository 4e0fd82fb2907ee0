"""What all training programs share. A task is one class; this folder does everything else.

The files, in the order in which a run needs them:

- main contains `run_program`, the `main` of every training program, which parses options, checks
  them before training, starts run after run, and reports.
- options contains the options that all programs share, and task the protocol that a task such as
  `experiments.image` implements.
- placement chooses the devices of the nodes. plan makes runs from options, with steps, learning
  rate and optimizer.
- methods and topologies contain the algorithms and graphs that you can choose by name.
- output writes the files of a run, and says which options a resumed run must keep.
- train contains the training loop, and trainer its compiled programs. evaluation evaluates the
  average model and the models of the nodes.
- asynchronous and asynchronous_job replace train for asynchronous nodes.
"""
