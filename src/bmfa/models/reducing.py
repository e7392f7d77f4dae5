"""Reduce the tokens of a model from block to block, and give dense outputs their grid back."""

from torch import Tensor, nn

from bmfa.models.hosts import find_host, refuse_reduction
from bmfa.models.patching import unpatch
from bmfa.models.reduced import Pass, ReducedBlock, reduced_blocks
from bmfa.models.screens import Place
from bmfa.reduction import Policy, parse
from bmfa.reduction.backends import check_backend


def reduce(
    model: nn.Module,
    policy: Policy | str,
    *,
    backend: str = "auto",
    dense: bool | None = None,
) -> nn.Module:
    """Reduce the tokens from block to block; returns the same model, changed in place.

    The policy is one of bmfa.reduction or its name. Class, distillation and register tokens stay;
    every picture keeps the same number of tokens. With `dense` the tokens behind the last block get
    their grid back, each spatial token with the value of the one that holds it, so that pooling and
    dense heads see exact multiplicities; by default so where the model itself pools spatial tokens.
    A model that is patched or reduced already is restored first; `unpatch` undoes it.
    """
    chosen = parse(policy) if isinstance(policy, str) else policy
    if not isinstance(chosen, Policy):
        raise TypeError(f"policy is {policy!r}; pass one of bmfa.reduction, or a name as 'tome:8'")
    check_backend(backend)
    host = find_host(model)
    if host.branches is None:
        refuse_reduction(model, host)
    unpatch(model)
    place = Place(host.prefix)
    place.watch(host.projection)
    depth = len(host.blocks)
    run = Pass(place, chosen, depth, backend, host.pools if dense is None else dense)
    for layer, (block, attention) in enumerate(zip(host.blocks, host.attentions, strict=True)):
        ReducedBlock(block, layer, host.branches, run).install()
        host.sized(layer, place, run).install(attention)
    return model


def final_tokens(model: nn.Module) -> int:
    """The tokens behind the last block in the last pass, prefix tokens included."""
    return _finished(model).tokens


def final_sizes(model: nn.Module) -> Tensor:
    """(B, T') how many tokens each of them stood for."""
    run = _finished(model)
    if run.size is None:
        raise RuntimeError("no block removed a token in the last pass; every size is 1")
    return run.size


def unmerge(model: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens (B, T', C) of the last pass back on the grid: (B, prefix + N, C), raster order.

    Each spatial token has the value of the one it was merged into, a pruned one that of its nearest
    neighbour on the grid that was not pruned; transformed sequences (DCT) are transformed back.
    Where the model gave the grid back itself, its tokens are returned as they are.
    """
    run = _finished(model)
    full = run.place.prefix + (0 if run.grid is None else run.grid.size)
    expected = full if run.dense else run.tokens
    if tokens.dim() != 3 or tokens.shape[1] != expected:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}; pass (B, {expected}, C) of the last pass"
        )
    return tokens if run.dense else run.restore(tokens)


def _finished(model: nn.Module) -> Pass:
    blocks = reduced_blocks(model)
    if not blocks:
        raise ValueError("the model is not reduced; call bmfa.reduce(model, 'tome:8') first")
    run = blocks[0].run
    if run.layer != run.depth:
        raise RuntimeError("no picture went through the model; call it first")
    return run
