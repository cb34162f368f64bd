"""Speculation: drafters propose tokens, the target judges them at once, the output is the same.

The rule is SAME unless REJECTION is asked for: the target chooses at each row what it would choose
without speculation, and a draft is accepted when it is that. Drafters draw with the target's own
random numbers (`draw`: a race), so sampled drafts are accepted not much less than by rejection.
Greedy or sampled, tokens do not depend on the drafter, on k, or on whether there is speculation.

What is where: `setting` (what `--speculate` asks for), `build` (what is checked, what is opened),
`tree` (what is drafted), `drafter` (who drafts: `ngram`, `mtp`, `medusa`, `eagle_drafter`,
`draft_model`; `draft_rounds` runs their rows), `verify` and `rejection` (what is accepted),
`late` (the same on a device), `rounds_ahead`, `chains_ahead` and `trees_ahead` (drafts chosen
there), `run_limits` (where an accepted run ends), `acceptance`, `cost_model` and `adaptive` (how
deep to draft), `head_file`, `eagle` and `eagle_padded` (weights, their arithmetic), `speculator`
(all of it in the engine's step). Tokens are chosen by the engine's own sampler: one code says what
a token's distribution is, with or without drafts.

A step with drafts. n is len(tokens); a decode has n - 1 positions computed.

1. `scheduler` gives decodes their token, prompts theirs, and drafts what is left of tokens and
   blocks (`scheduling_drafts`): a draft never preempts anybody, and its blocks go back first.
2. The vote carries what each rank offers (`Speculator.offer`): who may draft, tokens expected and
   rows at each depth, rank 0's costs. All agree on the depth of the drafts made at this step's end,
   and so on the number of collective rounds (law 1).
3. `batch` puts a tree's tokens behind the last known one, `logits_rows` holds all of these rows. A
   chain is like a chunk of a prompt; the nodes of a branching tree have slots of their own,
   positions by depth, and `ForwardBatch.ancestors`.
4. `runner.choose` verifies; accepted nodes' latents are put where their positions are.
5. `scheduler.commit` appends the run as far as it is wanted, then shares full blocks: the key of a
   block is made of accepted tokens, the prefix tree never sees a rejected one. Nothing else is
   undone: latents behind the last token are overwritten before they are read.
6. `Speculator.draft` asks the drafter, on every rank, whatever became of its requests: with what
   the step computed (hidden rows) of sequences that go on. An MTP layer's rounds write behind the
   sequences' ends, into blocks that were grown ahead.

Where tokens are chosen on a device, 4 to 6 are asked of it at once (`late`), and the host waits for
what was chosen and what was drafted behind it together.
"""
