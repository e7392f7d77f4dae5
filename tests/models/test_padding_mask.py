"""Masks of padding: read by value outside of graphs, and one node of a compiled graph."""

import pytest
import torch

from bmfa.models import patch
from bmfa.models.padding_mask import valid_keys
from models.supported_models import inputs_of, make_supported


def test_a_mask_that_hides_tokens_behind_the_grid_is_refused() -> None:
    mask = torch.ones(1, 1, 1, 1 + 16 + 2, dtype=torch.bool)
    assert valid_keys(mask, 1, 2) is None
    mask[..., 5] = False
    valid = valid_keys(mask, 1, 2)
    assert valid is not None and valid.shape == (1, 16) and not valid[0, 4] and valid.sum() == 15
    mask[..., -1] = False
    with pytest.raises(ValueError, match="not on the grid"):
        valid_keys(mask, 1, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_padding_mask_is_a_node_of_one_graph() -> None:
    model, inputs = make_supported("vit"), inputs_of("vit")
    patch(model, leaves=2, allow_dense=False, layers="all")
    whole = torch.ones(2, 1 + 64, dtype=torch.bool)
    padded, without_class = whole.clone(), whole.clone()
    padded[1, 40:] = False
    without_class[:, 0] = False
    outputs = [model(**inputs, attention_mask=mask).logits for mask in (whole, padded)]
    assert not torch.equal(*outputs)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask, expected in zip((whole, padded), outputs, strict=True):
        torch.testing.assert_close(compiled(**inputs, attention_mask=mask).logits, expected)
    with pytest.raises(ValueError, match="pass a padding mask"):
        compiled(**inputs, attention_mask=without_class)
    torch.compiler.reset()


@pytest.mark.parametrize("shape", [(2, 1, 1, 19), (2, 3, 19, 19), (19, 19), (1, 19)])
def test_the_operator_is_registered_for_compilers(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape)
    mask[..., 4:9] = -torch.inf
    torch.library.opcheck(torch.ops.bmfa.valid_keys.default, (mask, 1, 2))
