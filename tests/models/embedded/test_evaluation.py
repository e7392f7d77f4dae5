"""How masks and classes of the embedded model are measured."""

import torch

from bmfa.models.embedded import EmbeddedViT
from bmfa.models.embedded.evaluation import evaluate, held_out_row, mask_iou


def test_the_iou_of_masks():
    masks = torch.zeros(3, 4, 4, dtype=torch.bool)
    masks[0, :2], masks[1, :2] = True, True
    logits = torch.full((3, 4, 4), -1.0)
    logits[0, :2] = 1.0
    logits[1, :1] = 1.0
    assert mask_iou(logits, masks).tolist() == [1.0, 0.5, 1.0]


def test_a_row_has_the_measures_and_what_was_measured():
    model = EmbeddedViT().eval()
    row = held_out_row(model, 2, 2, 8.0, 0)
    frame = {"what": "held-out", "img_size": 256, "tokens": 1024, "grain": 8.0, "images": 2}
    measured = evaluate(model, images=2, size=256, grain=8.0, batch_size=1)
    assert row == frame | dict(measured)
    assert set(measured) == {"top1_percent", "mask_iou"}
