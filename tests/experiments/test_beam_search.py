"""Beam search, against a search written with lists; `test_seq2seq.py` enumerates sequences."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import beam_search

VOCABULARY = 4
PADDING = 0
BEGIN = 1
END = 2
IDS = {"begin_id": BEGIN, "end_id": END, "padding_id": PADDING}
LENGTH = 4
STATE = 5


@functools.cache
def make_weights(seed):
    """A recurrent model of random weights: what comes next depends on all tokens so far."""
    generator = np.random.default_rng(seed)
    return {
        "recurrent": generator.normal(0, 1.0, (STATE, STATE)).astype(np.float32),
        "inputs": generator.normal(0, 2.0, (VOCABULARY, STATE)).astype(np.float32),
        "outputs": generator.normal(0, 1.5, (STATE, VOCABULARY)).astype(np.float32),
    }


def make_states(batch, seed=0):
    """The first state of each input, as if an encoder had made it: `[B, STATE]`."""
    return np.random.default_rng(100 + seed).normal(0, 1, (batch, STATE)).astype(np.float32)


def step(weights, state, tokens):
    state = jnp.tanh(state @ weights["recurrent"] + weights["inputs"][tokens])
    return state @ weights["outputs"], state


@functools.partial(jax.jit, static_argnames=("beam", "alpha", "max_length"))
def search(weights, states, max_lengths, beam, alpha=0.6, max_length=LENGTH):
    return beam_search.beam_search(
        lambda cache, tokens, index: step(weights, cache, tokens),
        jnp.repeat(states, beam, axis=0),
        max_lengths,
        max_length,
        beam=beam,
        alpha=alpha,
        **IDS,
    )


def compute_log_probs(weights, state, prefix):
    """Log probabilities of the token after a prefix, in NumPy and without a cache."""
    for token in (BEGIN, *prefix):
        state = np.tanh(state @ weights["recurrent"] + weights["inputs"][token])
    logits = (state @ weights["outputs"]).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def penalize(length, alpha):
    return ((5 + length) / 6) ** alpha


def search_with_lists(weights, state, max_length, beam, alpha):
    """Beam search as its docstring says, to the greatest length unless it is greedy."""
    live = [(0.0, ())]
    finished = []
    for length in range(1, max_length + 1):
        extensions = sorted(
            (
                (log_prob + compute_log_probs(weights, state, prefix)[token], (*prefix, token))
                for log_prob, prefix in live
                for token in range(VOCABULARY)
                if token == END or length < max_length
            ),
            reverse=True,
        )
        finished += [
            (log_prob / penalize(length, alpha), sequence)
            for log_prob, sequence in extensions[:beam]
            if sequence[-1] == END
        ]
        live = [extension for extension in extensions if extension[1][-1] != END][:beam]
        if beam == 1 and finished:
            break
    return max(finished)


def pad(sequence, length=LENGTH):
    return [*sequence, *[PADDING] * (length - len(sequence))]


@pytest.mark.parametrize(("seed", "beam"), [(0, 1), (1, 4)])
def test_is_the_search_with_lists(seed, beam):
    """For each input of a batch, though they have different greatest lengths."""
    states = make_states(8, seed)
    weights = make_weights(seed)
    limits = [1, 2, 3, 5, 8, 12, 12, 12]
    found = search(weights, states, jnp.array(limits), beam=beam, max_length=12)
    for state, limit, tokens, score in zip(states, limits, found.tokens, found.scores, strict=True):
        best_score, best = search_with_lists(weights, state, limit, beam, 0.6)
        assert tokens.tolist() == pad(best, 12)
        assert score == pytest.approx(best_score, rel=1e-4)


def count_steps(make_logits, beam, max_length=50):
    """Number of steps of a search over a model that knows only the number of tokens so far."""
    steps = []

    def step(cache, tokens, index):
        jax.debug.callback(lambda index: steps.append(int(index)), index)
        logits = make_logits(index)
        return jnp.tile(logits[None], (len(tokens), 1)), cache

    found = jax.jit(
        lambda lengths: beam_search.beam_search(step, None, lengths, max_length, beam=beam, **IDS)
    )(jnp.array([max_length]))
    jax.effects_barrier()
    return len(steps), found


def test_stops_when_no_live_hypothesis_can_win():
    """Ends at length 3, surely: what is live then has probability 1e-9 at the most."""
    tokens = jnp.array([-30.0, -30.0, -30.0, 0.0])
    end = tokens[::-1].at[END].set(30.0)
    steps, found = count_steps(lambda index: jnp.where(index < 2, tokens, end), beam=4)
    assert steps == 3
    assert found.tokens[0, :3].tolist() == [3, 3, END]


def test_goes_on_while_a_live_hypothesis_can_win():
    """The first end is better than the first live hypothesis, which is longer, at last."""

    def make_logits(index):
        first = jnp.log(jnp.array([1e-9, 1e-9, 0.51, 0.49]))
        later = jnp.array([-30.0, -30.0, -30.0, 0.0])
        last = later.at[END].set(30.0)
        return jnp.where(index == 0, first, jnp.where(index < 19, later, last))

    steps, found = count_steps(make_logits, beam=4)
    assert steps == 20
    assert found.tokens[0, :20].tolist() == [3] * 19 + [END]
    assert float(found.scores[0]) == pytest.approx(math.log(0.49) / (25 / 6) ** 0.6, rel=1e-3)
