"""Merge tokens from block to block, and compare policies by agreement with the full model.

Run with: python examples/merge_tokens.py
"""

import torch

import bmfa
from bmfa.data import EmbeddedImages

loaded = bmfa.load_model("embedded")
images = list(EmbeddedImages(50))  # 128x128 px, 24 classes
pixels = torch.stack([loaded.preprocess(image.pixels) for image in images])

with torch.inference_mode():
    full = loaded.logits(pixels).log_softmax(-1)  # (50, 24)
    print(f"{'policy':<16} {'tokens':>6} {'agreement':>9} {'output KL':>10}")
    print(f"{'full':<16} {1 + 16 * 16:>6}")
    for policy in ("tome:12", "free-energy:12", "tome:20", "free-energy:20"):
        bmfa.reduce(loaded.model, policy)
        reduced = loaded.logits(pixels).log_softmax(-1)
        tokens = bmfa.models.final_tokens(loaded.model)
        agreement = (reduced.argmax(-1) == full.argmax(-1)).float().mean()
        divergence = (full.exp() * (full - reduced)).sum(-1).mean()  # KL(full || reduced)
        print(f"{policy:<16} {tokens:>6} {agreement:>9.0%} {divergence:>10.1e}")
        bmfa.unpatch(loaded.model)
