"""A tree for every query and head."""

from functools import partial

import torch
from torch import Tensor

from bmfa.attention.inputs import AttentionInputs, AttentionOptions
from bmfa.attention.kernels import eager
from bmfa.attention.result import Computed
from bmfa.attention.tiling import unflatten
from bmfa.trees.build import screen_keys
from bmfa.trees.rules import ExactGap, Rule
from bmfa.trees.tree import Tree


def compute_per_query(inputs: AttentionInputs, options: AttentionOptions) -> Computed:
    """Build the trees and attend to their leaves."""
    assert options.rule is not None
    computed = _run_eager(inputs, options, options.rule)
    computed.output = computed.output.to(inputs.q.dtype)
    computed.measure_leaf_ratio = partial(_leaf_ratio, computed)
    return computed


def _run_eager(inputs: AttentionInputs, options: AttentionOptions, rule: Rule) -> Computed:
    """Build trees from mean keys or streamed scores, then attend to their leaves."""
    q, k, v = inputs.copy_shared(inputs.flat)
    lead, valid = inputs.q.shape[:2], inputs.valid
    tree = screen_keys(
        unflatten(q.detach(), 0, lead),
        unflatten(k[:, inputs.prefix :].detach(), 0, lead),
        inputs.grid,
        rule,
        scale=inputs.scale,
        tau=inputs.tau,
        max_depth=options.max_depth,
        valid=None if valid is None else valid[:, None, None, :],
    )
    if _splits_all_but_ties(rule, options) and torch.is_grad_enabled() and _needs_grad(q, k, v):
        # A leaf of equal scores has their common gradient, which is not that of each of its keys.
        mask = None if valid is None else inputs.add_prefix(valid)
        if mask is not None and len(mask) > 1:
            mask = mask.repeat_interleave(lead[1], 0)
        output = eager.dense_attention(q, k, v, scale=inputs.scale, tau=inputs.tau, valid=mask)
    else:
        output = eager.tree_attention(
            q, k, v, tree.flat(), prefix=inputs.prefix, scale=inputs.scale
        )
    return Computed(unflatten(output, 0, lead), partial(_identity, tree))


def _splits_all_but_ties(rule: Rule, options: AttentionOptions) -> bool:
    """True if the leaves of a rule are tokens, or blocks with equal scores."""
    return isinstance(rule, ExactGap) and rule.epsilon == 0.0 and options.max_depth is None


def _needs_grad(*tensors: Tensor) -> bool:
    return any(x.requires_grad for x in tensors)


# Functions of modules instead of lambdas: results of compiled graphs hold them.
def _identity(tree: Tree) -> Tree:
    return tree


def _leaf_ratio(computed: Computed) -> float:
    return float(computed.make_tree().leaf_ratio.mean())
