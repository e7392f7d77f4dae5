"""Reduce the tokens of a model from block to block, and give dense outputs their grid back."""

from torch import Tensor, nn

from bmfa.merging import Policy, parse
from bmfa.merging.dispatch import check_backend
from bmfa.models.forwards import has_own_forward, override_method
from bmfa.models.hosts import find_host, refuse_reduction
from bmfa.models.patching import unpatch
from bmfa.models.reduced import ExposedPass, Progress, ReducedBlock, Reduction, reductions_in
from bmfa.models.screens import TokenGrid


def reduce(
    model: nn.Module,
    policy: Policy | str,
    *,
    backend: str = "auto",
    dense: bool | None = None,
) -> nn.Module:
    """Reduce the tokens from block to block; returns the same model, changed in place.

    The policy is one of bmfa.merging or its name. Class, distillation and register tokens stay;
    every picture keeps the same number of tokens. With `dense` the tokens behind the last block get
    their grid back, each spatial token with the value of the one that holds it, so that pooling and
    dense heads see exact multiplicities; by default so where the model pools spatial tokens or is a
    part of another. Where something reads the tokens between the blocks (hooks, hidden states, timm's
    `forward_intermediates`), every block returns them on the whole grid; with `dense=False` none does.
    A model that is patched or reduced already is restored first; `unpatch` undoes it.
    """
    chosen = parse(policy) if isinstance(policy, str) else policy
    if not isinstance(chosen, Policy):
        raise TypeError(f"policy is {policy!r}; pass one of bmfa.merging, or a name as 'tome:8'")
    checked_backend = check_backend(backend)
    host = find_host(model)
    if host.branches is None:
        refuse_reduction(model, host)
    for layer, block in enumerate(host.blocks):
        if has_own_forward(block):
            raise TypeError(
                f"block {layer} of {type(model).__name__} has a forward of its own, set on the "
                "instance by whatever wrapped it, so its branches are unknown; remove the wrapper, or "
                "apply it after bmfa.reduce"
            )
    unpatch(model)
    grid = TokenGrid(host.prefix)
    grid.watch(host.projection)
    whole = host.pools if dense is None else dense
    reduction = Reduction(grid, chosen, host.blocks, checked_backend, whole, dense is not False)
    for layer, (block, attention) in enumerate(zip(host.blocks, host.attentions, strict=True)):
        override_method(block, ReducedBlock(layer, host.branches, reduction))
        host.sized(layer, grid, reduction).install(attention)
    if hasattr(host.tower, "forward_intermediates"):
        override_method(host.tower, ExposedPass(reduction), "forward_intermediates")
    return model


def final_tokens(model: nn.Module) -> int:
    """The tokens behind the last block in the last pass of this thread, prefix tokens included."""
    return _finished(model)[1].tokens


def final_sizes(model: nn.Module) -> Tensor:
    """(B, T') how many tokens each of them stood for."""
    size = _finished(model)[1].size
    if size is None:
        raise RuntimeError("no block removed a token in the last pass; every size is 1")
    return size


def unmerge(model: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens (B, T', C) of this thread's last pass back on the grid: (B, prefix + N, C), raster order.

    Each spatial token has the value of the one it was merged into, a pruned one that of its nearest
    neighbour on the grid that was not pruned; transformed sequences (DCT) are transformed back.
    Where the model gave the grid back itself, its tokens are returned as they are.
    """
    reduction, progress = _finished(model)
    whole = reduction.dense or progress.exposed
    expected = reduction.grid.prefix + progress.grid.size if whole else progress.tokens
    if tokens.dim() != 3 or tokens.shape[1] != expected:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}; pass (B, {expected}, C) of the last pass"
        )
    return tokens if whole else reduction.restore(progress, tokens)


def _finished(model: nn.Module) -> tuple[Reduction, Progress]:
    found = reductions_in(model)
    if not found:
        raise ValueError("the model is not reduced; call bmfa.reduce(model, 'tome:8') first")
    progress = found[0].finished.current
    if progress is None:
        raise RuntimeError("no picture went through the model in this thread; call it first")
    return found[0], progress
