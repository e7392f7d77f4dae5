"""Replace the attention of a timm model by tiled attention, and measure time and error.

Tiled attention pays off from a few thousand tokens on. So that this runs on a CPU in seconds and
without a download, the model has two blocks and random weights: the times are real, the errors say
nothing about a trained model.

Run with: python examples/speed_up_model.py
"""

import statistics
import time

import timm
import torch

import bmfa


def run(
    model: torch.nn.Module, pixels: torch.Tensor, repeats: int = 3
) -> tuple[torch.Tensor, float]:
    """Return the last features and the median time of a forward pass in milliseconds."""
    features = model.forward_features(pixels)  # this call also warms up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.forward_features(pixels)
        times.append(time.perf_counter() - start)
    return features, 1000 * statistics.median(times)


torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=768, depth=2).eval()  # 48x48 tokens
pixels = torch.nn.functional.interpolate(torch.rand(1, 3, 48, 48), size=768, mode="bicubic")

with torch.inference_mode():
    full, full_ms = run(model, pixels)
    print(f"full attention   {full_ms:6.0f} ms")
    for leaves in (0.05, 0.2):
        bmfa.patch(model, leaves=leaves, layers="all")
        features, ms = run(model, pixels)
        error = float((features - full).norm() / full.norm())
        print(f"leaves={leaves:<9} {ms:6.0f} ms, {full_ms / ms:.1f}x, features move by {error:.3%}")
    bmfa.unpatch(model)
    print(f"bit-identical after unpatch: {torch.equal(run(model, pixels, 1)[0], full)}")
