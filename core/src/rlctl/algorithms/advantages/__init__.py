"""Advantage estimators, one a file; :data:`rlctl.algorithms.table.ADVANTAGES` names them.

An estimator is a pure function that names what it takes among these inputs (R rows, N tokens of the batch, prompts included,
C components of the reward); numbers are float64, on the CPU:

=====================  ===========  ====================================================================================
``scores``             ``[R]``      reward of each row, shaped as the section ``reward`` says, less the KL where that is in it
``groups``             ``[R]``      index of each row's prompt; rows of one prompt need not be neighbours
``mask``               ``[N]``      True where a token is trained
``row_ids``            ``[N]``      the row of each token
``positions``          ``[N]``      place of each token in its row
``token_rewards``      ``[N]``      the shaped reward at the last trained token of a row, less the KL of each where that is in it
``components``         ``[C, R]``   unweighted value of each component
``component_weights``  ``[C]``      their weights in the score
``rollout_log_probs``  ``[N]``      log-probs of the sampled tokens, of the engine that sampled them
``greedy_scores``      ``[R]``      reward of a greedy completion of the row's prompt (a rollout of its own)
``old_log_probs``      ``[N]``      log-probs of the policy before the update (a pass of its own)
``sum_p2``             ``[N]``      sum of the squared probabilities of the vocabulary under that policy (the same pass)
``values``             ``[N]``      what the critic says of the state before each token (there is a section ``critic``)
=====================  ===========  ====================================================================================

It returns advantages ``[R]``, spread over the tokens of each row, or ``[N]``; or (advantages, returns). What stands at tokens
that are not trained is not read. A group of one row has nothing to compare itself with: where the formula subtracts what
the group has in common, its advantage is zero.
"""
