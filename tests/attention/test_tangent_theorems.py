"""Theorems about tangent tiles, for the specification and for the kernel in torch."""

import math
import os
from pathlib import Path

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
from tiled_cases import TiledCase, tiled_case

Array = npt.NDArray[np.float64]
SEEDS = range(12)


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


@pytest.mark.parametrize("seed", SEEDS)
def test_energy_is_tau_times_the_divergence_of_the_returned_weights(seed: int) -> None:
    """tau KL(weights || exact) = tau (log Z - log Z~) = E >= 0, and the output moves by at most
    diam(V) sqrt(E / 2 tau)."""
    case = tiled_case(7000 + seed, shape=(13, 11), poison=False)
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


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tangent_is_never_above_the_free_energy_of_its_tile(seed: int) -> None:
    """A(q) is convex, so that its tangent at qbar is at most A(q), with equality at qbar."""
    case = tiled_case(7100 + seed, shape=(17, 19), poison=False)
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


@pytest.mark.parametrize("seed", range(6))
def test_block_means_are_the_tangent_at_zero(seed: int) -> None:
    """With queries that cancel in every group, a tile has the logit log n + c q . mean k."""
    case = tiled_case(7200 + seed, shape=(16, 24), poison=False)
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
                assert abs(got[:, tile] - mean).max() <= 1e-10 * (1 + abs(tokens_of[tokens]).max())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_correction_is_at_most_u_times_the_diameter(seed: int) -> None:
    case = tiled_case(7300 + seed, shape=(13, 11), poison=False)
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
    if case.settings["tau"] <= 1 and np.ptp(case.k.numpy()[..., case.settings["prefix"] :, :]) > 0:
        assert clipped or abs(head.cross).max() < 1e-10


def block_mean_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int) -> Tensor:
    """Attention over the mean keys and mean values of all tiles, with their counts, and the prefix."""
    counts = (tiling.slot_tokens >= 0).sum(-1)
    k_mean, v_mean = (
        tokens_to_tiles(x[:, :, prefix:], tiling, x.dtype)
        .sum(2)
        .view(*x.shape[:2], -1, x.shape[-1])
        / counts.unsqueeze(-1)
        for x in (k, v)
    )
    keys, values = (
        torch.cat((k[:, :, :prefix], k_mean), 2),
        torch.cat((v[:, :, :prefix], v_mean), 2),
    )
    bias = torch.cat((torch.zeros(prefix), counts.log())).expand(q.shape[2], -1)
    return scaled_dot_product_attention(q, keys, values, attn_mask=bias)


@pytest.mark.parametrize("size", [64, 128])
def test_tangents_are_better_than_block_means_on_a_smooth_image(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(9, 64, 8, 8, generator=generator)
    grown = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic")
    q, k, v = grown.reshape(3, 1, 3, 64, size * size).transpose(-1, -2)
    tiling = Tiling(Grid(size, size))
    for factor in (1.0, 2.0, 4.0):
        tangent, mean = block_errors(factor * q, k, v, tiling, 0)
        assert tangent < mean


def block_errors(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, prefix: int
) -> tuple[float, float]:
    """Relative L2 errors of tangent tiles and of block means, with nothing expanded."""
    with torch.no_grad():
        exact = scaled_dot_product_attention(q, k, v)[:, :, prefix:]
        scale = q.shape[-1] ** -0.5
        got = tiled_attention(q, k, v, tiling, prefix=prefix, scale=scale, expand=0)
        assert got is not None and int(got.expanded_count.sum()) == 0
        means = block_mean_attention(q, k, v, tiling, prefix)
        tangent, mean = (
            float((x[:, :, prefix:] - exact).norm() / exact.norm()) for x in (got.output, means)
        )
    return tangent, mean


MODELS = [
    ("timm:deit_tiny_patch16_224", "deit_tiny_patch16_224.fp16.safetensors", 16),
    ("timm:vit_small_patch14_dinov2", "vit_small_patch14_saliency.fp16.safetensors", 14),
]


@pytest.mark.slow
@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS names no folder")
@pytest.mark.parametrize("tokens_across", [32, 64])
@pytest.mark.parametrize(("model", "weights", "patch"), MODELS)
def test_tangents_are_no_worse_than_block_means_on_any_real_block(
    model: str, weights: str, patch: int, tokens_across: int
) -> None:
    from bmfa.evidence.bench.inputs import InputSource

    assets = Path(os.environ["BMFA_ASSETS"])
    source = InputSource(model, str(assets / "weights" / weights), str(assets / "photos"))
    recorded = source.record(patch * tokens_across, list(range(12)))
    tiling = Tiling(recorded.grid)
    errors = {
        block: block_errors(*(x.float() for x in qkv), tiling, recorded.prefix)
        for block, qkv in recorded.blocks.items()
    }
    assert len(errors) == 12
    for block, (tangent, mean) in errors.items():
        print(f"{model} {tokens_across**2} tokens, block {block}: {tangent:.4f}, mean {mean:.4f}")
    assert all(tangent <= mean for tangent, mean in errors.values()), errors
