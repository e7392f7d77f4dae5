"""A tree for every query and head."""

from functools import partial

import torch
from torch import Tensor

from bmfa.attention.dense import apply_fallback, exact_bound, value_diameter
from bmfa.attention.inputs import AttentionInputs, AttentionOptions, CertificateKind
from bmfa.attention.kernels import eager
from bmfa.attention.kernels.eager.certificate import total_variation
from bmfa.attention.result import Computed
from bmfa.attention.tiling import unflatten
from bmfa.trees.build import screen_keys
from bmfa.trees.certificates import exact_error, key_certificate
from bmfa.trees.rules import ExactGap, Rule
from bmfa.trees.tree import Tree


def compute_per_query(inputs: AttentionInputs, options: AttentionOptions) -> Computed:
    """Build the trees and attend to their leaves, then the certificate and the fallback."""
    assert options.rule is not None
    computed = _run_eager(inputs, options, options.rule)
    computed.output = computed.output.to(inputs.q.dtype)  # before it is certified
    if options.certificate is not None:
        tree = computed.make_tree()
        computed.make_tree = partial(_identity, tree)
        _certify(inputs, computed, tree, options.certificate)
        if options.fallback is not None:
            apply_fallback(inputs, computed, options.fallback)
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


def _certify(
    inputs: AttentionInputs, computed: Computed, tree: Tree, kind: CertificateKind
) -> None:
    """Bound E over all keys, and with it |output - exact|, for every query.

    With a the attention of the tree in float64, |output - exact| <= |output - a| + D s(E / tau), where
    D is the diameter of the values and s bounds the total variation of two distributions by their
    divergence. The first part is measured.
    """
    shape, prefix = inputs.q.shape[:3], inputs.prefix
    q, k, v = (x.detach() for x in inputs.copy_shared(inputs.flat_double))
    if q.numel() == 0:
        computed.certificate = computed.energy_bound = q.new_zeros(shape)
        return
    bound = exact_error if kind == "scores" else key_certificate
    flat = tree.flat()
    energy = bound(q * inputs.scale, k[:, prefix:], flat, k[:, :prefix])  # (B H, Q)
    attention = eager.tree_attention(q, k, v, flat, prefix=prefix, scale=inputs.scale)
    lead = shape[:2]
    distance = exact_bound(
        inputs, unflatten(attention, 0, lead), computed.output.detach(), slice(None), k.shape[1]
    )
    moved = value_diameter(inputs, v) * total_variation(energy / inputs.tau)
    computed.certificate = distance + moved.view(shape) * (1 + 1e-12)
    computed.energy_bound = energy.view(shape)
    if (valid := inputs.valid_queries) is not None:  # their outputs are undefined
        computed.certificate = computed.certificate.where(valid.unsqueeze(1), 0.0)


def certificate_kind(rule: Rule) -> CertificateKind:
    """What the certificate of a rule is computed from unless it is given: what the rule reads."""
    return "scores" if rule.needs == "tokens" else "boxes"


# Functions of modules instead of lambdas: results of compiled graphs hold them.
def _identity(tree: Tree) -> Tree:
    return tree


def _leaf_ratio(computed: Computed) -> float:
    return float(computed.make_tree().leaf_ratio.mean())
