"""The error E of trees on queries and keys, rounded up.

q is (G, Q, d) and already scaled, keys are (G, N, d), trees are a flat batch of G Q.
"""

import torch
from torch import Tensor

from bmfa.trees.keys import key_scores, query_chunks, score_bounds
from bmfa.trees.pyramid import machine_epsilon
from bmfa.trees.tree import Tree

# Scores of a chunk, as in `bmfa.trees.build`.
CHUNK_ELEMENTS = 1 << 20
# Allowances for rounding, in machine epsilons. A score of d products errs by less than 4 d epsilons of
# |q| max |k|; E itself, a few dozen operations, by less than 64 epsilons.
SCORE_ROUNDINGS, ERROR_ROUNDINGS = 4, 64


def exact_error(q: Tensor, keys: Tensor, tree: Tree, prefix_keys: Tensor) -> Tensor:
    """Compute E over all keys, with prefix tokens as exact leaves, rounded up.

    With the spatial error E_s and the share r of the spatial keys in Z, E = -tau log(1 - r (1 -
    exp(-E_s / tau))). If more than half of Z is lost, the logarithms of Z and Z~ are subtracted
    instead.

    Args:
        q: (G, Q, d) scaled queries.
        keys: (G, N, d) spatial keys.
        tree: Flat batch of G Q trees.
        prefix_keys: (G, P, d) keys of prefix tokens, P >= 0.

    Returns:
        (G, Q) errors in units of the scores.
    """
    errors = []
    for heads, queries, pairs in query_chunks(len(q), q.shape[1], tree.grid.size, CHUNK_ELEMENTS):
        rows, part = q[heads, queries], tree[pairs]
        scores = key_scores(keys[heads].transpose(0, 1), rows)  # (N, B)
        spatial_error = part.error(scores.T) / tree.tau
        masked = scores if part.valid is None else scores.masked_fill(~part.valid, -torch.inf)
        spatial = (masked / tree.tau).logsumexp(0)
        prefix = key_scores(prefix_keys[heads].transpose(0, 1), rows) / tree.tau
        prefix = prefix.logsumexp(0)  # -inf without prefix tokens
        log_z = torch.logaddexp(prefix, spatial)
        lost = (spatial - log_z).exp() * -torch.expm1(-spatial_error)
        difference = log_z - torch.logaddexp(prefix, spatial - spatial_error)
        error = torch.where(lost < 0.5, -torch.log1p(-lost.clamp(max=0.5)), difference) * tree.tau
        # Rounding a score by delta changes F and F~ by at most delta each.
        epsilon = machine_epsilon(q)
        longest = torch.linalg.vector_norm(keys[heads], dim=-1).amax(-1)
        rounding = SCORE_ROUNDINGS * q.shape[-1] * epsilon * score_bounds(longest, rows)
        errors.append(error * (1 + ERROR_ROUNDINGS * epsilon) + rounding)
    return torch.cat(errors).view(q.shape[:2])
