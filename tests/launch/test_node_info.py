"""The place of a node in a job whose nodes are programs of their own, from its environment."""

import pytest

from gossipjax.launch import NodeInfo, find_node

ADDRESSES = "127.0.0.1:5000,127.0.0.1:5001,127.0.0.1:5002"
LAUNCHER = {"GOSSIPJAX_NODE_ADDRESSES": ADDRESSES, "GOSSIPJAX_NODE": "1", "GOSSIPJAX_JOB": "j"}
COORDINATOR = {"GOSSIPJAX_COORDINATOR_ADDRESS": "127.0.0.1:5000"}
THREE = {"GOSSIPJAX_NUM_PROCESSES": "3"}
SLURM = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}


@pytest.fixture
def set_variables(fresh_process):
    def set_all(variables):
        for name, value in variables.items():
            fresh_process.setenv(name, value)

    return set_all


def test_variables_of_the_launcher(set_variables):
    set_variables(LAUNCHER)
    contacts = ("127.0.0.1:5000", "127.0.0.1:5002")
    node = NodeInfo(1, 3, "127.0.0.1:5001", contacts, False, "j")
    assert find_node() == node
    set_variables({"GOSSIPJAX_RESTART": "2"})
    assert find_node() == node._replace(is_restart=True)
    set_variables(SLURM)  # in which the launcher may run
    assert find_node() == node._replace(is_restart=True)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        (THREE, "GOSSIPJAX_PROCESS_ID"),
        (SLURM, "SLURM_PROCID"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_node_0_listens_at_the_address_and_the_others_where_they_reach_it(
    set_variables, numbers, name
):
    set_variables(COORDINATOR | numbers | {name: "0"})
    assert find_node() == NodeInfo(0, 3, "127.0.0.1:5000", (), False, "")
    set_variables({name: "2"})
    assert find_node() == NodeInfo(2, 3, "127.0.0.1:0", ("127.0.0.1:5000",), False, "")


@pytest.mark.parametrize(
    "variables",
    [{}, {"GOSSIPJAX_NUM_PROCESSES": "1"}, SLURM | {"GOSSIPJAX_NUM_PROCESSES": "1"}],
)
def test_a_job_of_one_process_has_no_node(set_variables, variables):
    set_variables(variables)
    assert find_node() is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GOSSIPJAX_NODE_ADDRESSES": ADDRESSES}, "GOSSIPJAX_NODE must be .* 0 to 2, got None"),
        ({"GOSSIPJAX_NODE": "1"}, "GOSSIPJAX_NODE_ADDRESSES must .* got GOSSIPJAX_NODE=1 alone"),
        (COORDINATOR, "must be given together, got 127.0.0.1:5000, None and None"),
        (SLURM, "Slurm runs 3 processes.*GOSSIPJAX_COORDINATOR_ADDRESS=HOST:PORT"),
    ],
)
def test_incomplete_and_contradicting_variables(set_variables, variables, message):
    set_variables(variables)
    with pytest.raises(ValueError, match=message):
        find_node()
