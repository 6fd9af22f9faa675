"""Reference implementations of the algorithms, written from the papers' equations as plain loops in float64.

They are slow on purpose, share nothing with ``rlctl.algorithms`` (whose authors did not write them), and are what the
fast versions are compared with. ``core/tests/test_oracle*.py`` check them against hand-computed numbers.

What goes in
------------
A batch is a list of rows; everything that a token has is a list of lists, ragged, of response tokens only (no prompt,
no padding). Within one batch all such lists have the same shape.

``rewards``        one float a row: the outcome's reward.
``token_rewards``  one float a token, for the estimators that discount or accumulate (gae, reinforce_plus_plus, remax,
                   optimal_token_baseline). What stands at a masked token is not read.
``masks``          one bool a token; False for a token that is not trained (a tool's answer in a multi-turn row, or a
                   row that was filtered out). A row may be all False, or empty.
``groups``         one hashable id a row; rows of a prompt share it and need not be neighbours. A row without an
                   unmasked token is still a member of its group, with its reward.
``log_probs``      one number a token: a float, or a float64 torch scalar where a gradient is wanted (``basics.leaves``
                   makes them, ``basics.gradients`` reads the gradients as floats).

What comes out
--------------
Advantages: a list of lists of floats, 0.0 at masked tokens; ``(advantages, returns)`` where the estimator has returns.
Losses and KL: a list of lists of float64 torch scalars, **before** aggregation, 0.0 at masked tokens. For sequence
losses (gspo, geo_mean) they are the terms whose seq-mean-token-mean is the paper's loss.
Weights: ``aggregation.weights`` gives one float a token; ``aggregation.weighted_sum`` of terms and weights is the loss.

Conventions that hold everywhere
--------------------------------
* A masked token is skipped: recursions run over the unmasked tokens of a row as if the others were not there.
* A group of one has mean 0 and standard deviation 1 (its advantage is its reward), as verl does it. rlctl takes the mean
  of one to be that one, as the papers' formulas say: its advantage is 0, for it has nothing to be compared with. The
  comparison leaves such groups out and states rlctl's own definition apart.
* Standard deviations within a group are sample deviations (n - 1), with 1e-6 added to the deviation.
* Whitening over the batch is over unmasked tokens, with the sample variance (n - 1) and 1e-8 added to the variance.
* Log ratios are not clamped before the exponential unless ``log_ratio_bound`` is given. verl clamps them to [-20, 20];
  ``cases`` keeps within that range, so that both agree.
* At a kink (ratio exactly at a clip boundary) the token counts as not clipped.

Modules: ``advantages`` (outcome rewards in groups), ``token_advantages`` (gae, reinforce_plus_plus, remax,
optimal_token_baseline), ``policy_losses``, ``sequence_losses`` (gspo, geo_mean), ``covariance_losses`` (clip_cov,
kl_cov), ``kl``, ``aggregation``, ``value``, ``rollout_correction``, ``dapo``, ``preference``, and ``cases`` (seeded
random batches).
"""
