"""Examples on two processes."""

from launching import run_job

from experiments.examples import grain_language_model


def test_two_processes():
    """All in one job, as most of its time is the start of the processes."""
    code = (
        "from experiments.examples import flax_nnx, grain_language_model\n"
        "print('reached', 'nnx', flax_nnx.main(steps=60) > 0.8, flush=True)\n"
        "print('reached', 'grain', grain_language_model.main(steps=20) < 3.8, flush=True)\n"
    )
    done = run_job(code, "--processes", 2, "--local-devices", 4)
    assert done.returncode == 0, done.stderr
    lines = {
        line[line.index("reached") :] for line in done.stdout.splitlines() if "reached" in line
    }
    assert lines == {"reached nnx True", "reached grain True"}


def test_a_language_model_with_outer_steps():
    assert grain_language_model.main("diloco", steps=30) < 3.6
