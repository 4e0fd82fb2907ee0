"""Mutants: small faults in every layer, and the tests that must find them.

    python tests/mutants.py [WORD ...] [--list] [--unchanged]

Applies each mutant to a copy of the checkout, runs its tests there, and prints which were killed.
WORD chooses the mutants whose file, name or text contains it. --unchanged leaves the code as it
is: all must survive then, or a test fails for another reason.

A line of the table is a mutant: file | its tests (arguments of pytest, in tests/) | name | a text
that occurs once in the file => what takes its place.
"""

import argparse
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAX_SECONDS = 600  # a mutant may hang
OUTCOMES = {0: "SURVIVED", 1: "killed", 5: "NO TEST RAN"}

TABLE = """
gossipjax/topology/_static.py | topology/test_topology.py -k "definition and ring" | ring with two hops to one side | n, [1, -1] => n, [1, 2]
gossipjax/topology/_cycles.py | topology/test_topology.py -k "definition and two_peer" | peers two hops apart | powers[(k + i) % => powers[(k + 2 * i) %
gossipjax/topology/_cycles.py | topology/test_topology.py -k "definition and bipartite" | bipartite pairs shifted | odd + 2 * hop - 1 => odd + 2 * hop + 1
gossipjax/topology/_cycles.py | topology/test_topology.py -k random_peer_draws | random peers backwards | (numbers + chosen) => (numbers - chosen)
gossipjax/topology/_finite_time.py | topology/test_topology.py -k base_graph_averages | weights of a meeting | size / (part.size + later) => 1 / (1 + later)
gossipjax/topology/permutations.py | topology/test_topology.py -k any_column_stochastic | paths of swapped colors end early | while (displaced := edge_at => if (displaced := edge_at
gossipjax/topology/_round.py | topology/test_schedule.py -k doubly_stochastic | columns taken for rows | np.bincount(self.receivers, self.weights => np.bincount(self.senders, self.weights
gossipjax/topology/schedule.py | topology/test_topology.py -k piecewise_starts | a piece does not start at its round 0 | cycle[(step - start) % len(cycle)] => cycle[step % len(cycle)]
gossipjax/topology/schedule.py | topology/test_schedule.py -k canonical | canonical steps forget the start | len(steps) - len(cycle) + (offset => (offset
gossipjax/topology/permutations.py | test_composed_axis.py -k to_the_bit | rows that stay are mixed up | received_row[stays]] = sent_row[stays] => received_row[stays]] = received_row[stays]
gossipjax/topology/spectra.py | topology/test_spectra.py -k spectral_gap | gap per step instead of per cycle | math.exp(log / schedule.period if per_round else log) => math.exp(log / schedule.period)
gossipjax/wire/_messages.py | collectives/test_codecs.py -k share_a_message | one key for all arrays | (key, np.arange(len(groups))) => (key, 0 * np.arange(len(groups)))
gossipjax/wire/_integers.py | collectives/test_codecs.py -k share_a_message | small arrays share blocks | replace(self, block=length), blocks * length => self, size
gossipjax/wire/_floats.py | collectives/test_wire.py -k too_large | scaled beyond the largest value | maxexp - 1), -limit => maxexp - 0), -limit
gossipjax/nodes/_convolutions.py | test_convolutions.py -k those_of_lax | taps are shifted the wrong way | low = params["padding"][i][0] - k => low = params["padding"][i][0] + k
gossipjax/nodes/_convolutions.py | test_convolutions.py -k left_but | a model's own groups become products | sizes.groups not in self.sizes => all(sizes.groups % size for size in self.sizes)
gossipjax/step/train_step.py | test_scan.py -k "calls and sgp" | a scan starts at step 0 | np.arange(step, step + count => np.arange(0, count
gossipjax/wire/_integers.py | collectives/test_codecs.py -k right_on_average | rounding is biased | np.float32(1.5) => np.float32(1.25)
gossipjax/wire/_sparse.py | collectives/test_codecs.py -k "top_k_takes or random_k_takes" | top_k ignores negative values | jnp.isfinite(array), jnp.abs(array), => jnp.isfinite(array), array,
gossipjax/wire/_sparse.py | collectives/test_codecs.py -k random_k_takes | random_k draws from fixed groups | % widths + shift) => % widths)
gossipjax/collectives/_mixing.py | algorithms/test_algorithms.py -k "round_by_round and vmap and sgp-" | round of the next step, traced | numbers[step % lengths[0]] => numbers[(step + 1) % lengths[0]]
gossipjax/collectives/_mixing.py | algorithms/test_algorithms.py -k "round_by_round and vmap and sgp-" | round of the next step, static | round_at(int(step)) => round_at(int(step) + 1)
gossipjax/collectives/_averages.py | algorithms/test_osgp.py -k delivered_over_a_switch | uniform round divides by N | (total - sent) / (axis_size(axis_name) - 1) => (total - sent) / axis_size(axis_name)
gossipjax/collectives/_exchange.py | collectives/test_wire.py -k sender_keeps | remainder of a narrow message is dropped | if is_narrow or not drops.any(): => if not is_narrow and not drops.any():
gossipjax/collectives/_exchange.py | collectives/test_collectives.py -k shares_of_one_third | remainder of a division is dropped | or _divides_exactly(given.astype(dtype)) => or True
gossipjax/collectives/_exchange.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and random_k" | key of a codec without the node | fold_in(key, jax.lax.axis_index(axis_name)) => fold_in(key, 0)
gossipjax/collectives/_exchange.py | collectives/test_collectives.py -k a_nan_travels | fillers carry NaN | messages = list(map(_or_zeros, sends, messages)) => pass
gossipjax/collectives/_exchange.py | collectives/test_collectives.py -k many_peers | slots of a loop send one share | partial(round_.select, slot=number) => partial(round_.select, slot=0 * number)
gossipjax/collectives/_exchange.py | collectives/test_collectives.py -k large_leaves | a leaf that is no message of its own | if size >= MAX_BUCKET: => if False:
gossipjax/collectives/_exchange.py | algorithms/test_algorithms.py -k "round_by_round and vmap and sgp-" | senders of another round, as data | place = [self._index, => place = [0 * self._index,
gossipjax/exchanges/chain.py | test_mistakes.py -k is_refused | what follows a gossip is not looked at | chain[:i], chain[i + 1 :], ignored) => chain[:i], [], ignored)
gossipjax/step/mass_check.py | test_mistakes.py -k is_refused | a node that counts alone is not seen | or count_spread != 0 => or False
gossipjax/step/train_step.py | test_train_step.py -k one_trace_per_program | max_programs is ignored | MAX_PROGRAMS if max_programs is None else max_programs => MAX_PROGRAMS
gossipjax/collectives/_exchange.py | collectives/test_wire.py -k servers_of_several | all devices of a node send one part | shards, jax.lax.axis_index(local) => shards, 0
gossipjax/collectives/_exchange.py | algorithms/test_algorithms.py -k check_vma | as_varying is the identity | return x if varies(x, axis_name) else => return x if True else
gossipjax/collectives/_exchange.py | collectives/test_collectives.py -k differs_between_nodes | steps may differ between nodes | if axis_name in varying_axes(jnp.asarray(step)): => if False:
gossipjax/collectives/_averages.py | test_diagnostics.py -k distance_zero | means are not clipped | jnp.clip(jax.lax.pmean(buffer, axis_name), low, high) => jax.lax.pmean(buffer, axis_name)
gossipjax/step/buckets.py | test_train_step.py -k buckets | a program with effects is cut | if len(leaves_of_buckets) < 2 or traced.has_effects: => if len(leaves_of_buckets) < 2:
gossipjax/step/buckets.py | test_train_step.py -k buckets | leaves that come together travel apart | if is_full and ready[next_leaf] > ready[leaf]: => if is_full:
gossipjax/collectives/_averages.py | collectives/test_collectives.py -k alike | starts that differ are kept | node_spread(jnp.stack(list(map(_digest, parts))), axis_name) == 0 => node_spread(jnp.stack(list(map(_digest, parts))), axis_name) >= -1
gossipjax/collectives/_averages.py | collectives/test_collectives.py -k along_a_ring | parts of a ring mean in the wrong place | (node + 1 - hop) => (node - hop)
gossipjax/collectives/_averages.py | collectives/test_codecs.py -k averages_and_errors | error of an average counts once | lack = nodes * (average => lack = (average
gossipjax/collectives/_buffers.py | collectives/test_collectives.py -k pairs_may_exchange | second half of a packed word is lost | return low | high << 16 => return low
gossipjax/nodes/_composed_axis.py | test_composed_axis.py -k "every_collective or groups_and" | nodes are numbered across devices | device * axis.per_device + jax => device + axis.devices * jax
gossipjax/nodes/_composed_axis.py | test_composed_axis.py -k groups_and | groups turn the other way | np.roll(table, -hop => np.roll(table, hop
gossipjax/nodes/_blocks.py | test_composed_axis.py -k derivatives_by_a_rule | gradients are not put back in place | next(remaining) if _is_float => 0 * next(remaining) if _is_float
gossipjax/nodes/stacked.py | test_nodes.py -k rows_that_differ | rows that differ are taken for one model | if spreads[worst] <= MAX_SPREAD => if True
gossipjax/nodes/program.py | test_spmd.py -k servers_of_several_devices_are_nodes | local arguments are not divided | return P(nodes.axis_name, nodes.local_axis_name) => return P(nodes.axis_name)
gossipjax/processes.py | test_processes.py -k "holds_all_nodes or of_other_processes" | nodes of another process | devices[node * count // size] => devices[node % count]
gossipjax/sharding.py | algorithms/test_sharded.py -k parts_equal | state is not sharded as its parameters | shape[leading:] == expected => False
gossipjax/exchanges/transform.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and sgp-" | the weight is not mixed | state._replace(weight=weight) => state
gossipjax/exchanges/transform.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and dpsgd" | adapt-then-combine forgets the update | mix_once(add(x, updates), => mix_once(x,
gossipjax/algorithms/osgp.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and osgp" | sends by the round of the next step | number = step // overlap => number = step // overlap + 1
gossipjax/algorithms/osgp.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and osgp" | sends a step late | or step % overlap == 0 => or step % overlap == overlap - 1
gossipjax/algorithms/adpsgd.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and adpsgd" | history is off by one | (upcoming - delay) % capacity => (upcoming - delay + 1) % capacity
gossipjax/algorithms/allreduce.py | collectives/test_codecs.py -k that_of_one_step | a NaN is kept for ever | jnp.where(jnp.isfinite(e), e, jnp.zeros_like(e)) => e
gossipjax/collectives/_low_rank.py | algorithms/test_low_rank.py -k without_a_direction | a column of zeros is kept | return jnp.where(is_usable, new, old) => return new
gossipjax/collectives/_low_rank.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and low_rank" | what factors leave out is lost | errors[i] = leaves[i] - means[i] => pass
gossipjax/wire/_block_top_k.py | collectives/test_codecs.py -k block_top_k_equals | bins are of another width | np.asarray(RANGE / BINS => np.asarray(1 / BINS
gossipjax/exchanges/fragments.py | algorithms/test_outer.py -k "round_by_round and layers" | pieces are put where the first stands | table, new_columns, self.start, => table, new_columns, 0,
gossipjax/algorithms/outer/outer.py | algorithms/test_outer.py -k "thread_changes and delay" | an inner exchange is taken for the average | average = None if has_gossip_inside else received => average = received
gossipjax/algorithms/outer/outer.py | algorithms/test_error_feedback.py -k fragments | what is left out never decays | scale(state.error[self.fragment], plan.error_feedback) => scale(state.error[self.fragment], 1.0)
gossipjax/collectives/_averages.py | algorithms/test_error_feedback.py -k "oracle and senders" | senders are all nodes | (values != 0).astype(like.dtype) => (values == values).astype(like.dtype)
gossipjax/algorithms/easgd.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and easgd" | the center is pulled by one node | node_sum(pull, plan.wire) => pull
gossipjax/algorithms/choco.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and top_k" | differences are not added up | d + (m - s) => (m - s)
gossipjax/exchanges/apply_if_finite.py | algorithms/test_around.py -k all_nodes_skip | nodes do not agree to skip | failures = node_sum(failures, Wire(name)) => pass
gossipjax/algorithms/gradient_tracking.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and tracking" | the old gradient stays | subtract(mixed, updates) => mixed
gossipjax/algorithms/quasi_global.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and quasi_global" | speed is not divided by the rate | subtract(x, new_x), 1 / divisor => subtract(x, new_x), divisor
gossipjax/exchanges/model.py | algorithms/test_around.py -k not_finite_is_in_the_parameters | residuals keep NaN | jnp.where(jnp.isfinite(z), leaf - z, jnp.zeros_like(leaf)) => leaf - z
gossipjax/exchanges/model.py | algorithms/test_state.py -k "lands or rounded_value" | updates are not rounded twice | round_to(round_to(leaf, dtype) - wide => round_to(leaf - wide
gossipjax/exchanges/plan.py | algorithms/test_state.py -k canonical_steps_are | canonical steps ignore the overlap | canonical_step(step, self.overlap) => canonical_step(step)
gossipjax/exchanges/chain.py | test_train_step.py -k returned_to_their | a jump loses messages | if overlapped and overlapped.plan => if 0 and overlapped.plan
gossipjax/algorithms/outer/outer.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and osgp" | weights in flight do not count | weight = weight + in_flight.weight => pass
gossipjax/algorithms/outer/outer.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and osgp" | messages outlive an outer step | jax.tree.map(jnp.zeros_like, old[1]) => jax.tree.map(jnp.copy, old[1])
gossipjax/algorithms/outer/outer.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and damped" | gossip in outer steps takes the round of the step | step=self.steps.plan.round_number(self.step) => step=self.step
gossipjax/algorithms/outer/outer.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and damped" | local steps count the weight | local.count, residual=local.residual, plan => local.count, local.weight, residual=local.residual, plan
gossipjax/exchanges/transform.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and damped" | what damping holds back is lost | held_back=subtract(waiting, updates) => held_back=scale(waiting, 0)
gossipjax/algorithms/gradient_tracking.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and damped" | tracks undamped updates | state = state.keep(damped=updates) => state = state.keep(damped=change)
gossipjax/exchanges/stability.py | algorithms/test_outer_stability.py -k over_gossip | a simulation always takes round 0 | values[1], np.int32(step)) => values[1], np.int32(0))
gossipjax/exchanges/stability.py | algorithms/test_outer_stability.py -k over_gossip | a simulation forgets its state | change, state = tx.update(-pull * z, state, z, step=step) => change, _ = tx.update(-pull * z, state, z, step=step)
gossipjax/topology/spectra.py | topology/test_spectra.py -k growth | growth of the norm and not of the logarithm | log_scale = logs[-1] => log_scale = 0.0
gossipjax/topology/spectra.py | topology/test_spectra.py -k growth | a segment starts at round 0 of the schedule | step = first + k % period => step = k % period
gossipjax/checkpoint/_resize.py | algorithms/test_outer_gossip.py -k change_of_nodes | anchors without weights | _average_outside_gossip(_weigh_models(opt_state, old), template) => _average_outside_gossip(opt_state, template)
gossipjax/algorithms/outer/plan.py | algorithms/test_outer.py -k "round_by_round and vmap-3 and streaming" | fragments are sent a turn early | offset = (fragment + 1) * => offset = fragment *
gossipjax/step/train_step.py | test_train_step.py -k equals_one_device | local arguments are one off | [number + 2 if number else 1 => [number + 1 if number else 1
gossipjax/step/closed.py | test_decentralized_step.py -k "dense_oracle and vmap" | a closed step's own model is mixed, and not what it moved | subtract(upcast(new_params), upcast(params)) => upcast(new_params)
gossipjax/step/bytes_per_step.py | test_bytes_per_step.py -k "compiled_programs and sgp" | what is received counts as sent | Traffic(rows[:, 0], rows[:, 1]) => Traffic(rows[:, 1], rows[:, 0])
gossipjax/algorithms/outer/plan.py | algorithms/test_outer.py -k "OnTheHost and vmap or OnTheHost and mesh" | a step that is skipped forgets what was sent | "sent": Used(sent | used, sent) => "sent": Used(used, sent)
gossipjax/models.py | algorithms/test_algorithms.py -k "round_by_round and vmap-3 and osgp" | mass ignores what is in flight | numerators(params, state), in_flight.x) => numerators(params, state), 0)
gossipjax/exchanges/state.py | algorithms/test_state.py -k TestLocalModel | local models are not divided by the weight | debias(add(numerators(params, self), updates), self.weight) => add(numerators(params, self), updates)
gossipjax/step/batch_stats.py | test_batch_stats.py -k "mixed_as or round_of_the_step" | statistics are not weighted | weight.astype(s.dtype) * s => s
gossipjax/exchanges/plan.py | test_batch_stats.py -k "mixed_as or round_of_the_step" | mixed by the round of no step | step, self.schedule_by_step => step, self.schedule
gossipjax/checkpoint/_store.py | checkpoint/test_resume.py -k bit_for_bit | messages in flight are not restored | jax.tree.unflatten(structure, arrays) => jax.tree_util.tree_map_with_path(lambda path, x: x - x if "in_flight" in str(path) else x, jax.tree.unflatten(structure, arrays))
gossipjax/checkpoint/_checkpoints.py | checkpoint/test_save_restore.py -k WithoutAWith | a save without a block is not waited for | if not self._is_entered: => if False:
gossipjax/checkpoint/_store.py | checkpoint/test_agree.py | who has written ahead decides | return has_later_save or 0 < size == len(nodes) => return 0 < size == len(nodes)
gossipjax/checkpoint/_train_state.py | checkpoint/test_resume.py -k settings_that_differ | a new setting is not seen | for key in {**was, **now} => for key in was
gossipjax/checkpoint/_store.py | checkpoint/test_damaged.py -k no_damaged | files are not summed | if _sum_file(folder / name) != checksum: => if False:
gossipjax/checkpoint/_checkpoints.py | checkpoint/test_save_restore.py -k is_refused_where | newer checkpoints stay | other >= step and => other == step and
gossipjax/checkpoint/_resize.py | checkpoint/test_change_nodes.py -k "eight_five_eight or index" | the average model lacks what is in flight | jax.tree.map(np.add, x, arrange_like(x, sent.x)) => x
gossipjax/checkpoint/_resize.py | checkpoint/test_change_nodes.py -k index | all nodes draw the same numbers | _fold_in_nodes(part, nodes) if => broadcast(part) if
gossipjax/launch/_hello.py | launch/test_hello.py -k strangers | a meeting takes number N | if 0 < number < count and => if 0 < number <= count and
gossipjax/launch/_hello.py | launch/test_hello.py -k doubled_processes_and | two processes of one number | elif former is not None: => elif False:
gossipjax/launch/_hello.py | launch/test_hello.py -k left_is | who has left counts as present | count and not _forget_left(others): => count:
gossipjax/launch/_process_info.py | launch/test_node_info.py -k variables_of_the_launcher | a node is its own contact | if number != place) => if place >= 0)
gossipjax/launch/_process_info.py | launch/test_initialize.py -k contradict | numbers may contradict each other | if len(set(given.values())) > 1: => if len(given) > 9:
gossipjax/launch/_devices.py | launch/test_devices.py -k under_a_scheduler | a task that sees one GPU asks for another | return 0  # => return scheduled.local_rank  #
gossipjax/launch/_job.py | launch/test_launch.py -k delays_between | delays do not grow | min(2 * former, => min(former,
gossipjax/launch/_stall.py | launch/test_stall.py -k who_is_stuck | the first is taken for the last | p.beat.step == step != NO_STEP => p.beat.step != step != NO_STEP
gossipjax/asynchronous/_model.py | asynchronous/test_replay.py -k of_the_oracle | updates are not scaled by the weight | wp = tuple(jnp.asarray(w, p.dtype) * p for p in moved) => wp = moved
gossipjax/asynchronous/_model.py | asynchronous/test_replay.py -k of_the_oracle | the outer momentum is heavy ball, not Nesterov's | b - beta * a for => b * 0 - a for
experiments/training/delays.py | asynchronous/test_delays.py | delays count steps, not rounds | others // len(places) => others
gossipjax/launch/_check.py | launch/test_check.py -k a_secret | strangers are told all | is_same = hmac.compare_digest(end.hear(), prove(nonce)) => is_same = bool(end.hear())
gossipjax/asynchronous/_observer.py | asynchronous/test_observer.py -k one_dies | the dead look alive | if now - node.get("answered", 0.0) <= SILENT_SECONDS: => if True:
gossipjax/asynchronous/_settings.py | asynchronous/test_strangers.py -k bad_arguments | open to the world without a secret | if not may_connect(value, self.secret): => if False:
gossipjax/asynchronous/_sockets.py | asynchronous/test_strangers.py -k nothing_is_sent | strangers say where it connects | if not may_connect(address, self._secret): => if False:
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k mass_is_kept | a share is counted twice | peer.applied = message.number => pass
gossipjax/asynchronous/_founding.py | asynchronous/test_founding.py -k place_founds_once | a place founds again | if not self._is_founder or self._members.own_steps <= known_steps: => if True:
gossipjax/asynchronous/_founding.py | asynchronous/test_founding.py -k comes_back | who is cut off founds | nobody_gives and 2 * len(self._places()) > self._num_nodes => nobody_gives
gossipjax/asynchronous/_founding.py | asynchronous/test_founding.py -k "come_back and day" | a branch goes on beside the job | view.wants_mass or view.branch >= self.branch => True
gossipjax/asynchronous/_model.py | asynchronous/test_saving.py -k optimizer_back | a warm-up begins anew | return state._replace(**inner | {"count": count}) => return state
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k asks_that_cross | crossing averages swap | if own_ask_wins or not self._is_affordable => if not self._is_affordable
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k "mass_is_kept or killed" | shares to the dead are lost | self._take_back(peer.parcel.message) => peer.parcel = None
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k takes_no_more | a hung node takes all weight | return self._received_shares > self._settings.max_received and self.may_change => return False
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k takes_no_more | halves that go back count as given | parcel.mass is not None and parcel.text != RETURNED: => parcel.mass is not None:
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k taken_back | what was withdrawn counts when it comes | peer.applied = message.number => peer.applied = message.number - (message.kind == "withdraw")
gossipjax/asynchronous/_participant.py | asynchronous/test_protocol.py -k "mass_is_kept or loses_what" | a withdrawn average stays | self._undo_average(peer) => pass
gossipjax/asynchronous/_post.py | asynchronous/test_protocol.py -k loses_what | one bad path holds all shares up | if p.progress > bad_before and p.since > slow_before] => if True]
gossipjax/asynchronous/_post.py | asynchronous/test_protocol.py -k far_slower | a slow path holds all shares up | if p.progress > bad_before and p.since > slow_before] => if p.progress > bad_before]
gossipjax/asynchronous/_ending.py | asynchronous/test_protocol.py -k eldest_says | anybody ends the job | if eldest_living is not None and eldest_living in self._verdicts: => if self._verdicts:
gossipjax/asynchronous/_ending.py | asynchronous/test_protocol.py -k do_not_hear | the eldest forgets whom it does not hear | or any(self._list_unheard()) => or False
gossipjax/asynchronous/_ending.py | asynchronous/test_protocol.py -k "many_nodes_end or models_meet" | all decide the end | if eldest is None or self._members.identity < eldest.identity: => if True:
gossipjax/asynchronous/_membership.py | asynchronous/test_uneven.py -k has_left | nodes count alike | return self.weight / max( => return 1.0 or max(
gossipjax/asynchronous/_membership.py | asynchronous/test_protocol.py -k healed_partition | of two sides each pair decides | 2 * len(places) <= len(self.steps), min(side), life => False, life, life
gossipjax/asynchronous/_membership.py | asynchronous/test_protocol.py -k many_nodes | all are told at every beat | if len(others) <= MAX_NEIGHBORS: => if True:
gossipjax/asynchronous/_membership.py | asynchronous/test_protocol.py -k many_nodes | the largest declarer is told | declarer < self.deaths[life][0]: => declarer > self.deaths[life][0]:
gossipjax/asynchronous/_messages.py | asynchronous/test_strangers.py -k has_a_reason | NaN arrives | raise MessageError("with NaN or infinity") => pass
gossipjax/cost_model/exchange.py | cost_model/test_prediction.py -k its_formula | an early exchange waits | return self.late or int(self.is_early) => return self.late
gossipjax/cost_model/methods.py | cost_model/test_prediction.py -k what_its_method_sends | averages inside a node are sent | if plan.wire.axis_name == found[-1].wire.axis_name] => if plan.wire.axis_name]
gossipjax/cost_model/exchange.py | cost_model/test_prediction.py -k its_formula | half a ring | copy + 2 * (nodes - 1) * => copy + (nodes - 1) *
gossipjax/cost_model/simulation.py | cost_model/test_simulation.py -k meet_at_a_receiver | receivers take messages at once | self._in_free[target] if is_awaited else 0.0 => 0.0
gossipjax/cost_model/prediction.py | cost_model/test_prediction.py -k no_more_than_it_can | links without a limit | max(compute + exposed_seconds, awaited_seconds) => compute + exposed_seconds
experiments/training/trainer.py | experiments/test_trainer.py -k evaluated_with | statistics are never averaged | gx.average_batch_stats(batch_stats) if averages else => batch_stats if averages else
experiments/training/evaluation.py | experiments/test_trainer.py -k every_example_once | fillers count | jnp.where(is_example, value.astype(jnp.float32), 0.0) => value.astype(jnp.float32)
experiments/training/plan.py | experiments/test_training_choices.py -k warm_up_ends | rates by the step | self.learning_rate(step) => self.learning_rate(step + 1)
experiments/training/plan.py | experiments/test_training_choices.py -k with_a_warm_up | inverse square root one step late | jnp.sqrt(warmup_steps / (step + 1.0)) => jnp.sqrt(warmup_steps / (step + 2.0))
experiments/training/plan.py | experiments/test_presets.py -k of_the_papers | decays count from the warm-up | epochs.run) - warm_up: => epochs.run):
experiments/training/methods.py | experiments/test_training_choices.py -k every_row | a biased algorithm is not | _build_osgp(schedule, options, biased=True) => _build_osgp(schedule, options)
experiments/data/sharding.py | experiments/test_sharding.py -k gives_these | all nodes draw alike | size_per_node, seeds[node]) => size_per_node, seeds[0])
experiments/data/augmentation.py | experiments/test_records_batches.py -k reaches_every_part | images are never flipped | return pixels[:, ::-1] if flip => return pixels if flip
experiments/data/tokens.py | experiments/test_text.py -k padded | padding is not masked | columns < self.lengths => columns <= self.lengths
experiments/language.py | experiments/test_language.py -k sequence_begins | a token is predicted from itself | jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)) => jnp.pad(tokens, ((0, 0), (0, 0))
experiments/models/beam_search.py | experiments/test_beam_search.py -k search_with_lists | hypotheses of another input | rows = parents + beam * => rows = parents + 0 *
experiments/models/transformer.py | experiments/test_decoder.py -k that_of_numpy | rotation that is none | second * cos + first * sin => second * cos - first * sin
experiments/models/transformer.py | experiments/test_decoder.py -k that_of_numpy | a token sees the next | keys[None, :] <= queries => keys[None, :] <= 1 + queries
experiments/models/layers.py | experiments/test_image_models.py -k decay_leaves | scales decay | frozenset({"bias", "scale"}) => frozenset({"bias"})
experiments/compare/table.py | experiments/test_compare.py -k best_of_a_column | the largest loss is the best | (min if falls else max) => max
experiments/report/section.py | experiments/test_report_sections.py -k left_open | limits of a row are not minded | all(low <= row.low and row.high <= high => all(low <= row.value <= high
experiments/plan/choice.py | experiments/test_plan.py -k narrow_gossip | all-reduce only where it is fastest | cheapest * (1 + MIN_GAIN) => cheapest
experiments/quantities.py | experiments/test_plan.py -k test_quantities | bits are bytes | "bit": 1 / 8 => "bit": 1.0
experiments/rates/fits.py | experiments/test_rates.py -k power_laws | slopes over the sum | math.log(point.nodes * point.steps) => math.log(point.nodes + point.steps)
experiments/runner.py | experiments/test_runner.py -k how_a_run_ended | what diverged has failed | DIVERGED = "must be finite, got" => DIVERGED = "nothing says so"
experiments/speed/compiled/hlo.py | experiments/test_speed_compiled.py -k of_the_slices | messages are read, not written | yield opcode, 2 * count_operands( => yield opcode, count_operands(
experiments/speed/compiled/hlo.py | experiments/test_speed_compiled.py -k reads_messages | messages are never done | elif it.opcode.endswith("-done"): => elif False:
experiments/speed/wire/stragglers.py | experiments/test_speed_wire.py -k ideals | lockstep waits for the mean | 1 / factors.max(axis=1).mean() => 1 / factors.mean(axis=1).mean()
"""  # noqa: E501


class Mutant(NamedTuple):
    """A text of a file, what takes its place, and the tests that must find it."""

    file: str
    tests: list[str]
    name: str
    old: str
    new: str


def read_table() -> Iterator[Mutant]:
    for line in TABLE.strip().splitlines():
        file, tests, name, change = line.split(" | ", 3)
        yield Mutant(file, shlex.split(tests), name, *change.split(" => "))


def find_fault(mutant: Mutant) -> str | None:
    """Why a mutant cannot be applied and judged, as where its code has moved; None if it can."""
    if not (ROOT / mutant.file).is_file() or not (ROOT / "tests" / mutant.tests[0]).exists():
        return "FILE IS MISSING"
    count = (ROOT / mutant.file).read_text().count(mutant.old)
    return None if count == 1 else f"TEXT OCCURS {count} TIMES"


def copy_checkout(folder: Path) -> None:
    """Copies what git knows or would add, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def judge(mutant: Mutant, is_unchanged: bool) -> str:
    """Runs the tests of a mutant in a copy of its own; returns what became of it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_checkout(folder)
        if not is_unchanged:
            file = folder / mutant.file
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        tests = [f"tests/{mutant.tests[0]}", *mutant.tests[1:]]
        # The first lane alone must find a fault of the library.
        lanes = "" if mutant.file.startswith("experiments") else "not lab"
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", lanes, *tests]
        environment = os.environ | {"PYTHONPATH": name}  # also for processes that tests start
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=MAX_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"killed, after {MAX_SECONDS} s"
        return OUTCOMES.get(done.returncode, f"BROKEN, pytest's status {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument(
        "--unchanged", action="store_true", help="run the tests on the code as it is"
    )
    options = parser.parse_args()
    words = options.words or [""]
    outcomes: Counter[str] = Counter()
    for mutant in (m for m in read_table() if any(word in f"{m}" for word in words)):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        outcome = find_fault(mutant)
        if outcome is None:
            outcome = "listed" if options.list else judge(mutant, options.unchanged)
        outcomes[outcome] += 1
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        print(f"{seconds:4.0f} s  {outcome:9} {mutant.file}: {mutant.name}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))


if __name__ == "__main__":
    main()
