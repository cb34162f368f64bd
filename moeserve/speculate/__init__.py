"""Speculation: drafters propose tokens, the target judges them at once, the output is the same.

What is here needs no engine: `tree` (what is drafted), `drafter` (who drafts: `ngram`, `mtp`,
`medusa`, `eagle_drafter`, `draft_model`; `draft_rounds` runs their rows), `verify` and `rejection`
(what is accepted), `run_limits` (where an accepted run ends), `acceptance`, `cost_model` and
`adaptive` (how deep to draft), `head_file` and `eagle` (weights). The sampler is the engine's own
(`moeserve.sampler`): one code says what a token's distribution is, with or without drafts.

The rule is SAME unless REJECTION is asked for: the target chooses at each row what it would choose
without speculation, and a draft is accepted when it is that. Drafters draw with the target's own
random numbers (`draw`: a race), so sampled drafts are accepted not much less than by rejection.
Greedy or sampled, tokens do not depend on the drafter, on k, or on whether there is speculation.

How it plugs into the engine, step by step. n is len(tokens); a decode has n - 1 positions computed.

1. `sequence.Sequence`: slot `drafts: DraftTree | None`, set after a step, cleared in `preempted`.
2. `plan.StepPlan`: `trees: list[DraftTree]` by sequence (empty ones elsewhere); counts[i] is 1 +
   trees[i].num_nodes; `num_decode_tokens`, the sum of the decodes' counts, takes the place of
   `num_decodes` in `num_prefill_tokens`. `StepResult`: `verdicts` for `token_ids` and `logprobs`
   (`verify.Verdict`: tokens, nodes, logprobs, failed).
3. `scheduler.Scheduler.schedule`: decodes take their one token as now; behind them, before the
   prefills and from a budget that leaves every started prefill one token, drafts are added with
   what is left of the token budget (the dispatcher's limit) and of `cache.num_available` blocks: a
   draft never preempts anybody. `draft_room` bounds them (the context limit too); what does not fit
   is cut from the chain's end (`DraftTree.cut`), never by its tokens. `_take` grows blocks for
   start + count; for MTP grow to n + num_nodes + depth in the same place, where blocks are at hand:
   the step's own drafts run ahead (an ask's `most` is at most the positions owned - (n - 1)).
   `_plan`: sampled where start + count - num_nodes == n.
4. `scheduler.commit`: for a sequence with a verdict `cut_run(sequence, verdict.tokens)`, append
   those tokens (penalties follow by `Sequence.append`), then num_computed_tokens = len(tokens) - 1,
   then `cache.commit(lease, tokens, num_computed_tokens)`: in this order, so that a block's key is
   made of accepted tokens and the prefix tree never sees a rejected one. Nothing else is rolled
   back: latents behind num_computed_tokens are overwritten before they are read, blocks that drafts
   grew stay with the lease for the next step (`num_wasted_slots` may be more than a block then).
   `_advance` gives one TokenOutput with all tokens and logprobs of the run and the reason and stop
   id of `Run`; counters: output_tokens += Run.num_tokens, accepted += min(num_accepted,
   Run.num_tokens), rejected += num_nodes - num_accepted. TokenOutput gets both for usage
   (`accepted_prediction_tokens`, `rejected_prediction_tokens`). verdict.failed: append its tokens,
   then drop the sequence as now. Aborted in mid-verification: the run is dropped, as one token is.
   The front end takes several tokens an output already (`server.answer.push`, `llm._Run.take`):
   it stops at the token that completes a stop string and counts none behind it.
   `client` counts len(token_ids) of outputs: there what a stop string cut is still counted.
5. `batch.build_batch`: tokens of a row are tokens[start:] + tree.tokens; logits_rows holds all rows
   of a sequence that has drafts (spans replace `num_sampled`). A chain needs nothing else: a row
   attends to what stands before it. A tree needs `ForwardBatch.ancestors` (`ancestor_mask`), rotary
   positions apart from slots (`positions`), and after the verdict a copy of the accepted nodes'
   latents, in all layers, to the slots n .. n + num_accepted - 1: trees come second.
6. `runner.ModelRunner`: `forward` gives ForwardOutput back (hidden is wanted), `choose` calls
   `verify.verify(logits[:rows], members, trees, rule)` where it calls `sampler.sample`. New:
   `draft`, asks from the plan (hidden rows start .. start + num_accepted of each decode, all rows
   of a prefill's chunk, first = start; most = allotted where the sequence goes on, else 0), then
   `drafter.propose(asks, depth, max_tokens)` -> sequence.drafts. The dispatcher's step bound that
   `forward` leaves behind holds for the draft rounds.
7. `engine.Engine._run`: forward -> choose -> commit -> draft. The last is called on every
   path that leads out of forward (choosing failed, peers masked, nothing to do) with no asks, where
   agreed depth > 0 and the drafter is collective: law 1. An error inside it is handled like one of
   forward (`guard.explain`). `drafter.settle` after commit, `drafter.forget` for what ended, was
   preempted or failed. Seconds of drafting are a part of their own in the recorder ("drafting").
   Feed `Acceptance.add` from commit; `CostModel.add` where agreed.phase is DECODE.
8. `lockstep.Vote`: `offer` (2 * (K + 1) numbers) and `costs` (3 numbers, rank 0's count) as further
   columns behind `say_cause`; `StepAgreement.offers`, `costs`. Each rank then calls
   `policy.agree(offers, costs)`: AdaptiveDepth or FixedDepth, equal state on all ranks since both
   arguments are agreed. The depth is that of the drafts made at this step's end. The offer is about
   the sequences that will decode next: plan.decodes and those whose prompt ends in this plan. The
   name of the drafter, K and the rule go into `build._collective_settings`.
9. `recorder.StepRecorder`: `begin_step` counts rows of drafts as decode tokens (num_decode_tokens,
   `_rows_of_phases` is right already); a round of drafting has fewer rows than the step:
   `begin_round(rows by phase)` before each, so that the picks of the MTP layer's placement row have
   lengths of their own.
   `DeepSeekModel.draft` takes the observer; `models.interface.CausalLM.draft` must name it.
10. `startup.prepare`: with_mtp where the drafter is mtp; ConfigError if the checkpoint has none.
   Admission and the planner: max_num_sequences * (1 + K) above token_budget is no error but a note
   (drafts are cut). `memory`: the drafter's bytes, beside the cache.
11. Metrics: `Acceptance.by_position`, `mean_accepted`, policy.depth, policy.predicted, temperature.
"""
