"""Policy losses, one a file; :data:`rlctl.algorithms.table.POLICY_LOSSES` names them.

A loss is a pure function of one micro-batch that names what it takes among these inputs (N tokens, R rows, which are whole;
float32, on the engine's device):

=====================  =======  ======================================================================================
``log_probs``          ``[N]``  of the sampled tokens under the policy, with gradient
``old_log_probs``      ``[N]``  under the policy before the update; the current ones, detached, where nothing was updated
``advantages``         ``[N]``
``mask``               ``[N]``  True where a token is trained
``row_ids``            ``[N]``  the row of each token
``num_rows``           int      R
``entropy``            ``[N]``  with gradient
``item_weight``        ``[N]``  what the loss of each token is multiplied by, by ``actor.loss_agg_mode``
=====================  =======  ======================================================================================

and every other item field of the batch by its name (``rollout_log_probs``, ``ref_log_probs``). It returns the loss of each
token, or a :class:`~rlctl.algorithms.policy_losses.base.TokenPolicyLoss`. What it says of tokens outside the mask is not read;
the weights come from the normaliser, never from here, so that the step does not depend on the micro-batch. These tensors are whole
on every rank, also where a sequence is split over ranks: readers hand out the numbers of all of them.

Log-ratios are bounded to 20 nats before their exponential, so that one broken token cannot make an infinity; beyond the bound
the gradient is zero.
"""
