"""Optimal mixing weights: the published numbers."""

import sys

import networkx as nx
import numpy as np
import pytest

import gossipjax as gx

TORUS = nx.convert_node_labels_to_integers(nx.grid_2d_graph(4, 4, periodic=True))
# The slem of the fastest mixing chain (mixingmatrix 0.2.0).
GRAPHS = {
    "ring": (nx.cycle_graph(16), 0.9267),
    "star": (nx.star_graph(7), 0.8571),
    "torus": (TORUS, 0.6),
    "barbell": (nx.barbell_graph(5, 0), 0.9177),
}


def find_slem(matrix):
    return np.abs(np.linalg.eigvalsh(matrix - 1 / len(matrix))).max()


@pytest.mark.parametrize("name", GRAPHS)
def test_the_published_slem(name):
    graph, published = GRAPHS[name]
    edges = nx.to_numpy_array(graph, nodelist=range(len(graph))) + np.eye(len(graph))
    W = gx.topology.optimal_weights(graph)
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(axis=0), 1, rtol=0, atol=1e-12)
    assert (W[edges == 0] == 0).all()
    assert W.min() >= 0
    assert find_slem(W) == pytest.approx(published, abs=6e-5)
    metropolis = gx.topology.from_graph(graph, weights="metropolis").matrices()[0]
    assert find_slem(metropolis) > published - 1e-4


def test_the_schedule_of_a_graph_keeps_a_part_of_every_model():
    """The hub of a star has none for itself at the optimum, (n - 2) / (n - 1)."""
    star = gx.topology.from_graph(nx.star_graph(7), weights="optimal")
    assert star.is_doubly_stochastic
    W = star.matrices()[0]
    assert np.diag(W).min() == pytest.approx(1e-3, abs=1e-6)
    assert find_slem(W) == pytest.approx(1 - (1 - 1e-3) / 7, abs=1e-6)
    named = nx.relabel_nodes(nx.Graph([*nx.path_graph(3).edges, (1, 1)]), dict(enumerate("abc")))
    W = gx.topology.optimal_weights(named, min_self_weight=0.1)
    np.testing.assert_allclose(W, [[0.55, 0.45, 0], [0.45, 0.1, 0.45], [0, 0.45, 0.55]], atol=1e-6)
    assert gx.topology.optimal_weights(nx.empty_graph(1)).tolist() == [[1.0]]


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ImportError, match=r"pip install cvxpy"):
        gx.topology.from_graph(nx.path_graph(3), weights="optimal")
