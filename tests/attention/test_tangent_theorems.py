"""Theorems about tangent tiles, for the specification and for the kernel in torch."""

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.kernels.eager.tiles import tiled_attention
from bmfa.attention.kernels.eager.tiles.attention import _arrange
from bmfa.attention.kernels.reference.tiles import Head, softmax, tile_members
from bmfa.attention.tiling import Tiling, tokens_to_tiles
from bmfa.grid import Grid
from cases import MODELS, recorded_blocks
from tiled_cases import TiledCase, draw_case, smooth_fields

Array = npt.NDArray[np.float64]


def cases(first: int, count: int, grid: Grid, **options: Any) -> Iterator[TiledCase]:
    """Drawn cases in float64; tokens that do not exist hold 0."""
    for seed in range(first, first + count):
        drawn = {"grid": grid, "query_grid": None, "heads": (2, 2), "dims": (32, 32)} | options
        yield draw_case(seed, torch.float64, **drawn).map(torch.nan_to_num)


def heads_of(case: TiledCase) -> list[tuple[Head, float]]:
    """All heads of a case as the specification sees them, with the temperature."""
    exists = np.ones((len(case.q), case.tiling.grid.size), bool)
    if case.valid is not None:
        exists = case.valid.numpy()
    tau, prefix = case.settings["tau"], case.settings["prefix"]
    heads = []
    for b, h in np.ndindex(case.q.shape[:2]):
        q, k, v = (x[b, h].numpy() for x in (case.q, case.k, case.v))
        members = tile_members(case.tiling, exists[b])
        queries = tile_members(case.tiling.queries, exists[b])
        factor = case.settings["scale"] / tau
        heads.append((Head(q[prefix:], k, v, members, prefix, factor, queries=queries), tau))
    return heads


def some_expanded(head: Head, g: int) -> npt.NDArray[np.bool_]:
    """Expand the tiles with the larger half of the losses of a group."""
    return (head.losses[g] > np.median(head.losses[g])) & (head.counts > 0)


def exact_logits(head: Head, token: int) -> tuple[list[int], Array]:
    """Tokens in order, prefix first as negative numbers, and their exact logits."""
    present = [t for tokens in head.members for t in tokens]
    keys = np.concatenate((head.prefix_k, head.k[present]))
    names = [*range(-len(head.prefix_k), 0), *present]
    return names, np.asarray(head.factor * (keys @ head.q[token]))


def token_weights(
    head: Head, token: int, g: int, expanded: npt.NDArray[np.bool_]
) -> dict[int, float]:
    """Weights of all tokens in the attention of step 4 without the correction."""
    logits, _, _ = head.logits(token, g, expanded)
    weights = softmax(logits)
    coarse = [int(t) for t in np.flatnonzero(~expanded & (head.counts > 0))]
    exact = [t for tile in np.flatnonzero(expanded) for t in head.members[tile]]
    result = dict(
        zip([*exact, *range(-len(head.prefix_k), 0)], weights[len(coarse) :], strict=True)
    )
    for tile, weight in zip(coarse, weights, strict=False):
        p = softmax(head.factor * (head.k[head.members[tile]] @ head.q_mean[g]))
        result |= dict(zip(head.members[tile], weight * p, strict=True))
    return result


def test_energy_is_tau_times_the_divergence_of_the_returned_weights() -> None:
    """tau KL(weights || exact) = tau (log Z - log Z~) = E >= 0, and the output moves by at most
    diam(V) sqrt(E / 2 tau)."""
    for case in cases(7000, 12, Grid(13, 11)):
        for head, tau in heads_of(case):
            values = np.concatenate((head.prefix_v, head.v))
            for g, tokens in enumerate(head.queries):
                for token in tokens[:3]:
                    expanded = some_expanded(head, g)
                    names, exact = exact_logits(head, token)
                    weights = token_weights(head, token, g, expanded)
                    w = np.array([weights[name] for name in names])
                    assert (w >= 0).all() and w.sum() == pytest.approx(1.0)
                    log_z = np.logaddexp.reduce(exact)
                    coarse_logits, _, _ = head.logits(token, g, expanded)
                    energy = tau * (log_z - np.logaddexp.reduce(coarse_logits))
                    positive = w > 0
                    log_ratio = np.log(w[positive]) - (exact - log_z)[positive]
                    divergence = tau * float(w[positive] @ log_ratio)
                    size = 1 + abs(exact).max()
                    assert energy == pytest.approx(divergence, abs=1e-11 * size * tau)
                    assert energy >= -1e-12 * size * tau
                    output, _ = head.output(token, g, expanded, 0.0)
                    moved = np.linalg.norm(output - head.exact_output(head.q[token]))
                    present = values[[name + len(head.prefix_k) for name in names]]
                    diameter = np.linalg.norm(present[:, None] - present[None], axis=-1).max()
                    bound = diameter * math.sqrt(max(energy, 0.0) / (2 * tau))
                    assert moved <= bound + 1e-7 * size**0.5 * diameter  # the root of rounding


def test_the_tangent_is_never_above_the_free_energy_of_its_tile() -> None:
    """A(q) is convex, so that its tangent at qbar is at most A(q), with equality at qbar."""
    for case in cases(7100, 12, Grid(17, 19)):
        factor = case.settings["scale"] / case.settings["tau"]
        prefix = case.settings["prefix"]
        images = _arrange(case.q, case.k, case.v, case.tiling, prefix, prefix, factor, case.valid)
        specified = iter(heads_of(case))
        for head in (head for image in images for head in image):
            tangents, keys = head.tangents(slice(0, case.tiling.groups)), head.keys
            deviation = head.q - head.q_mean.unsqueeze(1)
            tangent = deviation @ tangents.k.transpose(1, 2) + tangents.log_mass.unsqueeze(1)
            scores = torch.einsum("rsd,tnd->rstn", head.q, keys.k)
            free_energy = scores.masked_fill(~keys.exists, -torch.inf).logsumexp(-1)  # (R, S, T)
            present = ~keys.empty
            rounding = 1e-13 * (1 + float(free_energy[..., present].abs().amax()))
            assert bool((tangent <= free_energy + rounding)[..., present].all())
            scores = torch.einsum("rd,tnd->rtn", head.q_mean, keys.k)
            at_mean = scores.masked_fill(~keys.exists, -torch.inf).logsumexp(-1)
            assert bool(((at_mean - tangents.log_mass).abs() <= rounding)[:, present].all())
            # The reference has the same tangents.
            want = next(specified)[0].log_mass[case.tiling.group_order.numpy()]
            difference = tangents.log_mass.numpy()[want > -np.inf] - want[want > -np.inf]
            assert abs(difference).max() <= rounding


def test_block_means_are_the_tangent_at_zero() -> None:
    """With queries that cancel in every group, a tile has the logit log n + c q . mean k."""
    for case in cases(7200, 6, Grid(16, 24), masked=False):
        q = case.q.clone()
        prefix = case.settings["prefix"]
        for tokens in case.tiling.slot_tokens:
            tokens = tokens[tokens >= 0] + prefix
            half = len(tokens) // 2
            q[:, :, tokens[half : 2 * half]] = -q[:, :, tokens[:half]]
            q[:, :, tokens[2 * half :]] = 0.0
        for head, _ in heads_of(TiledCase(q, case.k, case.v, case.tiling, case.settings, None)):
            assert abs(head.q_mean).max() < 1e-14
            for tile, tokens in enumerate(head.members):
                assert head.log_mass[:, tile] == pytest.approx(math.log(len(tokens)), abs=1e-10)
                for got, tokens_of in ((head.k_tangent, head.k), (head.v_tangent, head.v)):
                    mean = tokens_of[tokens].mean(0)
                    assert abs(got[:, tile] - mean).max() <= 1e-10 * (
                        1 + abs(tokens_of[tokens]).max()
                    )


def test_the_correction_is_at_most_u_times_the_diameter() -> None:
    for case in cases(7300, 12, Grid(13, 11)):
        clipped = 0
        for head, _ in heads_of(case):
            for token_v in (tokens for tokens in head.members if tokens):
                spread = head.v[token_v][:, None] - head.v[token_v][None]
                assert np.linalg.norm(spread, axis=-1).max() <= head.diameter * (1 + 1e-12)
            head.q = head.q + 100 * (head.q - head.q.mean(0))  # far from the representatives
            for g, tokens in enumerate(head.queries):
                for token in tokens[:3]:
                    expanded = some_expanded(head, g)
                    logits, _, is_tile = head.logits(token, g, expanded)
                    u = softmax(logits)[is_tile].sum()
                    _, correction = head.output(token, g, expanded, 1.2)
                    # Squares of numbers below 1e-150 underflow; quotients of them may be inexact, too.
                    if u < 1e-150:
                        continue
                    length = np.linalg.norm(correction / u)
                    assert length <= head.diameter * (1 + 1e-9)  # of large exponents
                    clipped += length > 0.999 * head.diameter > 0
        if (
            case.settings["tau"] <= 1
            and np.ptp(case.k.numpy()[..., case.settings["prefix"] :, :]) > 0
        ):
            assert clipped or abs(head.cross).max() < 1e-10


def block_errors(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int
) -> tuple[float, float]:
    """Relative L2 errors of tangent tiles and of attention over the mean keys and values of all tiles,
    with nothing expanded."""
    counts = (tiling.slot_tokens >= 0).sum(-1)
    sums = (tokens_to_tiles(x[:, :, prefix:], tiling, x.dtype).sum(2) for x in (k, v))
    means = ((x / counts.unsqueeze(-1)).view(*q.shape[:2], -1, x.shape[-1]) for x in sums)
    keys, values = (torch.cat((x[:, :, :prefix], y), 2) for x, y in zip((k, v), means, strict=True))
    bias = torch.cat((torch.zeros(prefix), counts.log())).expand(q.shape[2], -1)
    settings = {"prefix": prefix, "scale": q.shape[-1] ** -0.5, "expand": 0}
    with torch.no_grad():
        exact = scaled_dot_product_attention(q, k, v)[:, :, prefix:]
        tangent = tiled_attention(q, k, v, tiling, **settings)
        assert tangent is not None and int(tangent.expanded_count.sum()) == 0
        coarse = scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    errors = [x[:, :, prefix:] - exact for x in (tangent.output, coarse)]
    return float(errors[0].norm() / exact.norm()), float(errors[1].norm() / exact.norm())


def test_tangents_are_better_than_block_means_on_a_smooth_image() -> None:
    q, k, v = smooth_fields(0, 64)
    for factor in (1.0, 2.0, 4.0):
        tangent, mean = block_errors(factor * q, k, v, Tiling(Grid(64, 64)), 0)
        assert tangent < mean


@pytest.mark.slow
@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS names no folder")
def test_tangents_are_no_worse_than_block_means_on_any_real_block() -> None:
    for model, tokens_across in itertools.product(MODELS, (32, 64)):
        recorded = recorded_blocks(model, tokens_across)
        assert len(recorded.blocks) == 12
        for block, qkv in recorded.blocks.items():
            tiling = Tiling(recorded.grid)
            tangent, mean = block_errors(*(x.float() for x in qkv), tiling, recorded.prefix)
            print(f"{model} {tokens_across**2} tokens, {block}: {tangent:.4f}, mean {mean:.4f}")
            assert tangent <= mean
