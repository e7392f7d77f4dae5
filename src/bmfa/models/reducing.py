"""Reduce the tokens of a model from block to block, and map outputs back to the grid."""

import os

from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.merging import Policy, parse
from bmfa.merging.dispatch import Backend, check_backend
from bmfa.models.families import find_vision_transformer, raise_not_reducible
from bmfa.models.patching import read_plan, unpatch
from bmfa.models.plan import ReductionPlan
from bmfa.models.replacement import class_name
from bmfa.models.token_reduction import (
    ExposedBlocks,
    ReducedAttention,
    ReducedBlock,
    ReductionState,
    TokenReduction,
    find_reduction,
)


def reduce(
    model: nn.Module,
    policy: Policy | str | None = None,
    *,
    plan: ReductionPlan | str | os.PathLike[str] | None = None,
    backend: Backend = "auto",
    dense: bool | None = None,
) -> nn.Module:
    """Reduce the tokens of a model from block to block, in place.

    Class, distillation and register tokens are never merged, and all images of a batch keep the same
    number of tokens. A model that is already patched or reduced is restored first.

    If something reads the tokens between the blocks (forward hooks, hidden states, timm's
    `forward_intermediates`), every block returns them on the full grid, unless `dense` is False.

    Args:
        model: A timm or transformers Vision Transformer, the embedded model, or a model that contains
            one of them. With rotary position embeddings, a merged token has the mean of the rotations of
            the tokens it stands for.
        policy: A policy of `bmfa.merging` or its name, e.g. `"tome:8"`. Either it or `plan` is given.
        plan: A `ReductionPlan` of `bmfa.tune_reduction`, or the file of one. It is for one model and one
            image size.
        backend: `"auto"`, `"eager"` or `"triton"`.
        dense: If True, the last block returns the full grid, each spatial token with the value of the
            token it was merged into, so that pooling and dense heads see exact multiplicities. None
            selects this if the model pools spatial tokens or is a part of another model.

    Returns:
        The same model.

    Raises:
        TypeError: If the model cannot be reduced, or `policy` is neither a policy nor a name.
        ValueError: If the name of the policy or of the backend is unknown, or the plan is for another
            model. In a forward pass: if the policy removes more tokens than there are, or the plan is
            for another image size.
        OSError: If the file of the plan cannot be read.

    Example:
        >>> import bmfa, torch
        >>> from bmfa.models import final_tokens
        >>> model = bmfa.reduce(bmfa.load_model("embedded").model, "tome:8")
        >>> model(torch.zeros(1, 3, 128, 128)).shape
        torch.Size([1, 24])
        >>> final_tokens(model)  # 257 - 8 blocks * 8 tokens
        193
    """
    if (policy is None) == (plan is None):
        given = "neither a policy nor a plan is" if plan is None else "a policy and a plan are"
        raise ValueError(f"{given} given; pass one of them, e.g. policy='free-energy:8'")
    chosen: object = parse(policy) if isinstance(policy, str) else policy
    if plan is not None:
        plan = read_plan(plan, ReductionPlan, "tune_reduction", model)
        chosen = plan.reduction
    if not isinstance(chosen, Policy):
        raise TypeError(
            f"policy is {policy!r}; pass one of bmfa.merging, or a name such as 'tome:8'"
        )
    check_backend(backend)
    vit = find_vision_transformer(model)
    if vit.layout is None:
        raise_not_reducible(model, vit)
    if vit.layout.rotary and chosen.transforms:
        raise TypeError(
            f"policy {chosen} transforms tokens into others that have no position, and "
            f"{class_name(vit.blocks[0])} rotates queries and keys by their position; use a policy "
            "that merges or prunes tokens, e.g. 'free-energy:8'"
        )
    for layer, block in enumerate(vit.blocks):
        if "forward" in vars(block):
            raise TypeError(
                f"block {layer} of {type(model).__name__} has a forward of its own, set on the instance "
                "by a wrapper, so its branches are unknown; remove the wrapper, or apply it after "
                "bmfa.reduce"
            )
    unpatch(model)
    passes = vit.follow()
    reduction = TokenReduction(
        passes,
        chosen,
        vit.blocks,
        backend,
        dense=vit.reads_spatial_tokens if dense is None else dense,
        expose=dense is not False,
        planned=None if plan is None else Grid(*plan.grid),
    )
    for layer, (block, attention) in enumerate(zip(vit.blocks, vit.attentions, strict=True)):
        ReducedBlock(layer, vit.layout, reduction).install(block)
        vit.replacement(ReducedAttention(layer, passes, reduction)).install(attention)
    if hasattr(vit.encoder, "forward_intermediates"):
        ExposedBlocks(reduction).install(vit.encoder)
    return model


def final_tokens(model: nn.Module) -> int:
    """Count the tokens that were left after the last block.

    Args:
        model: A reduced model that was called in this thread.

    Returns:
        The number of tokens of an image in the last forward pass, prefix tokens included.

    Raises:
        ValueError: If the model is not reduced.
        RuntimeError: If it was not called in this thread.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.reduce(bmfa.load_model("embedded").model, "tome:4")
        >>> _ = model(torch.zeros(1, 3, 112, 112))
        >>> final_tokens(model)
        165
    """
    return last_pass(model)[1].tokens


def unmerge(model: nn.Module, tokens: Tensor) -> Tensor:
    """Map the tokens after the last block back to the grid.

    Args:
        model: A reduced model that was called in this thread.
        tokens: (B, T', C) tokens of the last forward pass, T' as `final_tokens` returns it; or
            (B, prefix + N, C) if the model itself returned the full grid (`dense`), which are returned
            unchanged.

    Returns:
        (B, prefix + N, C), spatial tokens in raster order. Each has the value of the token it was
        merged into; a pruned token that of the nearest token on the grid that was not pruned; tokens
        that were transformed (DCT) are transformed back.

    Raises:
        ValueError: If the model is not reduced, or `tokens` has another shape.
        RuntimeError: If the model was not called in this thread.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.reduce(bmfa.load_model("embedded").model, "tome:4", dense=False)
        >>> _ = model(torch.zeros(1, 3, 112, 112))
        >>> unmerge(model, torch.zeros(1, final_tokens(model), 96)).shape
        torch.Size([1, 197, 96])
    """
    reduction, state = last_pass(model)
    on_grid = reduction.dense or state.full_grid
    expected = reduction.passes.prefix + state.grid.size if on_grid else state.tokens
    if tokens.dim() != 3 or tokens.shape[1] != expected:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}; pass (B, {expected}, C) of the last pass"
        )
    return tokens if on_grid else reduction.unmerge(state, tokens)


def last_pass(model: nn.Module) -> tuple[TokenReduction, ReductionState]:
    reduction = find_reduction(model)
    if reduction is None:
        raise ValueError("the model is not reduced; call bmfa.reduce(model, 'tome:8') first")
    state: ReductionState | None = reduction.passes.thread.last_state
    if state is None:
        raise RuntimeError("the model was not called in this thread; call it first")
    return reduction, state
