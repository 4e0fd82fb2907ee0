"""Beam search over any model that predicts one token after the other.

References:
    Wu et al., "Google's Neural Machine Translation System", 2016, arXiv:1609.08144, section 7.
    Vaswani et al., "Attention Is All You Need", NIPS 2017, arXiv:1706.03762, section 6.1.

In shapes, B is the number of sequences, K of hypotheses kept for each, L their greatest length, V
the size of the vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""`step(cache, tokens, index) -> (logits, cache)`: of each of the B * K rows the token number
`index`, `[B * K]`, where number 0 is `begin_id`; the logits of the next token, `[B * K, V]`; and
what the model has to remember of the tokens so far, a pytree of arrays `[B * K, ...]`."""


class Hypotheses(NamedTuple):
    """The best sequence that was found for each of B inputs."""

    tokens: jax.Array  # ids `[B, L]`: without `begin_id`, up to `end_id`, then padding
    scores: jax.Array  # `[B]`, `log P(tokens) / length_penalty(length)`, which counts `end_id`


class _Search(NamedTuple):
    """State of a search."""

    length: jax.Array  # of the live hypotheses, those without `end_id`
    tokens: jax.Array  # `[B, K, 1 + L]`; the first is `begin_id`
    log_probs: jax.Array  # `[B, K]`, in falling order; -inf where there is no hypothesis
    cache: Any  # the model's, `[B * K, ...]`
    best: Hypotheses  # finished; score -inf where there is none
    is_done: jax.Array  # `[B]`, whether `best` is the result


def length_penalty(length: jax.Array, alpha: float) -> jax.Array:
    """Returns `((5 + length) / 6) ** alpha`, the divisor of log probabilities (Wu et al., eq. 14).

    >>> float(length_penalty(jnp.array(7), 1.0))
    2.0
    """
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    step: Step,
    cache: Any,
    max_lengths: jax.Array,
    max_length: int,
    *,
    begin_id: int,
    end_id: int,
    padding_id: int,
    beam: int = 4,
    alpha: float = 0.6,
) -> Hypotheses:
    """Searches the sequences of highest `log P / length_penalty`, for use within `jax.jit`.

    Of all one-token extensions of the K live hypotheses of an input, those among the best K that
    end with `end_id` are finished; the best K that do not are live next. An input is done when no
    live hypothesis can beat the best finished one. K = 1 is greedy search: it is done when the
    hypothesis ends. A hypothesis that reaches its greatest length can only end. The result for an
    input does not depend on the other inputs of the batch.

    Args:
        step: the model; a pure function.
        cache: what the model remembers before the first token: arrays `[B * beam, ...]`, where rows
            `b * beam` to `(b + 1) * beam - 1` belong to input b.
        max_lengths: greatest length of each sequence with its `end_id`, integers `[B]` in
            1..`max_length`.
        max_length: L.
        beam: K.
        alpha: exponent of the length penalty; 0 prefers short sequences most.
    """

    def is_running(search: _Search) -> jax.Array:
        return (search.length < max_length) & ~search.is_done.all()

    def advance(search: _Search) -> _Search:
        last = jax.lax.dynamic_index_in_dim(search.tokens, search.length, axis=2, keepdims=False)
        logits, cache = step(search.cache, last.reshape(-1), search.length)
        must_end = search.length + 1 >= max_lengths
        extensions = _extend(search, logits, must_end, end_id)
        best = _finish(search, extensions, alpha)
        tokens, log_probs, rows = _keep(extensions, beam)
        # To stop at K finished hypotheses would be faster and wrong: where a model is sure, K
        # unlikely ones can end before the likely one does.
        bound = log_probs[:, 0] / length_penalty(max_lengths, alpha)
        is_done = search.is_done | (bound <= best.scores)
        if beam == 1:
            is_done |= jnp.isfinite(best.scores)
        return _Search(
            length=search.length + 1,
            tokens=tokens,
            log_probs=log_probs,
            cache=jax.tree.map(lambda leaf: leaf[rows], cache),
            best=best,
            is_done=is_done,
        )

    start = _start(cache, len(max_lengths), max_length, beam, begin_id, padding_id)
    best = jax.lax.while_loop(is_running, advance, start).best
    return best._replace(tokens=best.tokens[:, 1:])


def _start(
    cache: Any, batch: int, max_length: int, beam: int, begin_id: int, padding_id: int
) -> _Search:
    """Returns a search with one live hypothesis, empty, for each input."""
    tokens = jnp.full((batch, beam, 1 + max_length), padding_id, jnp.int32)
    return _Search(
        length=jnp.array(0),
        tokens=tokens.at[:, :, 0].set(begin_id),
        log_probs=jnp.full((batch, beam), -jnp.inf).at[:, 0].set(0.0),
        cache=cache,
        best=Hypotheses(tokens[:, 0], jnp.full(batch, -jnp.inf)),
        is_done=jnp.zeros(batch, bool),
    )


class _Extensions(NamedTuple):
    """The best 2K extensions of an input's hypotheses by a token: at least K of them do not end."""

    length: jax.Array
    tokens: jax.Array  # `[B, 2K, 1 + L]`
    log_probs: jax.Array  # `[B, 2K]`, in falling order
    parents: jax.Array  # `[B, 2K]`, the extended hypothesis, 0..K-1
    is_end: jax.Array  # `[B, 2K]`, whether the last token is `end_id`


def _extend(search: _Search, logits: jax.Array, must_end: jax.Array, end_id: int) -> _Extensions:
    """Extends the live hypotheses, given logits `[B * K, V]` and which inputs `[B]` must end."""
    batch, beam = search.log_probs.shape
    vocabulary = logits.shape[-1]
    is_forbidden = must_end[:, None, None] & (jnp.arange(vocabulary) != end_id)[None, None]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(batch, beam, vocabulary)
    log_probs = search.log_probs[:, :, None] + jnp.where(is_forbidden, -jnp.inf, log_probs)
    log_probs, chosen = jax.lax.top_k(log_probs.reshape(batch, -1), 2 * beam)
    parents = chosen // vocabulary
    last = chosen % vocabulary
    length = search.length + 1
    tokens = jnp.take_along_axis(search.tokens, parents[:, :, None], axis=1)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, last, length, axis=2)
    return _Extensions(length, tokens, log_probs, parents, last == end_id)


def _finish(search: _Search, extensions: _Extensions, alpha: float) -> Hypotheses:
    """Returns the best finished hypotheses, those that end now included."""
    beam = search.log_probs.shape[1]
    ends = extensions.is_end & jnp.isfinite(extensions.log_probs) & ~search.is_done[:, None]
    ends &= (jnp.arange(2 * beam) < beam)[None]
    scores = extensions.log_probs / length_penalty(extensions.length, alpha)
    scores = jnp.where(ends, scores, -jnp.inf)
    scores = jnp.concatenate([search.best.scores[:, None], scores], axis=1)
    tokens = jnp.concatenate([search.best.tokens[:, None], extensions.tokens], axis=1)
    winner = scores.argmax(axis=1)[:, None]
    return Hypotheses(
        tokens=jnp.take_along_axis(tokens, winner[:, :, None], axis=1)[:, 0],
        scores=jnp.take_along_axis(scores, winner, axis=1)[:, 0],
    )


def _keep(extensions: _Extensions, beam: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the tokens, log probabilities and rows of the cache of the next live hypotheses."""
    log_probs = jnp.where(extensions.is_end, -jnp.inf, extensions.log_probs)
    log_probs, kept = jax.lax.top_k(log_probs, beam)
    tokens = jnp.take_along_axis(extensions.tokens, kept[:, :, None], axis=1)
    parents = jnp.take_along_axis(extensions.parents, kept, axis=1)
    rows = parents + beam * jnp.arange(len(parents))[:, None]
    return tokens, log_probs, rows.reshape(-1)
