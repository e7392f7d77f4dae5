"""Draw docs/saliency.png: time and output of a saliency model, with full attention and patched.

    python tools/saliency_figure.py --weights MODEL.safetensors --decoder DECODER.safetensors

The model is a ViT-S/14 with the keys of timm's vit_small_patch14_dinov2, the image an embedded scene.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

import bmfa
from bmfa.data.drawn.scenes import draw_scene
from bmfa.evidence import page
from bmfa.evidence.bench.saliency import load_decoder
from bmfa.models.weights import read_state_dict

SIZE, SCENE, ERROR, REPEATS = 896, 2, 0.03, 5
MEAN, STD = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def run(model: Any, decoder: Any, pixels: Tensor) -> tuple[Tensor, float]:
    """Return the saliency map, and the median seconds of the model."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        features = model.forward_features(pixels)[:, 1:]
        times.append(time.perf_counter() - start)
    side = SIZE // 14
    return decoder(features.mT.unflatten(2, (side, side)))[0, 0], statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--decoder", required=True)
    parser.add_argument("--output", default=Path(__file__).parents[1] / "docs" / "saliency.png")
    given = parser.parse_args()
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=SIZE).eval()
    state = {name: weight.float() for name, weight in read_state_dict(given.weights).items()}
    state["pos_embed"] = timm.layers.resample_abs_pos_embed(
        state["pos_embed"], new_size=[SIZE // 14] * 2, num_prefix_tokens=1
    )
    model.load_state_dict(state)
    decoder = load_decoder(given.decoder)
    scene = Image.fromarray(np.array(draw_scene(0, SCENE)[0].image.grey))
    image = scene.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).expand(3, SIZE, SIZE) / 255
    pixels = ((pixels - MEAN) / STD).unsqueeze(0)
    with torch.inference_mode():
        full, full_seconds = run(model, decoder, pixels)
        bmfa.patch(model, error=ERROR)
        fast, fast_seconds = run(model, decoder, pixels)
        change = float((fast - full).norm() / full.norm())
    titles = [
        f"image, {SIZE} x {SIZE} pixels",
        f"full attention: {full_seconds:.2f} s",
        f"error={ERROR:g}: {fast_seconds:.2f} s, {full_seconds / fast_seconds:.2f}x",
        f"difference, {change:.1%} of the map",
    ]
    print(*titles, sep="\n")
    with plt.style.context(Path(page.__file__).with_name("bmfa.mplstyle")):
        figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
        for axis, shown, title in zip(
            axes, (image, full, fast, (fast - full).abs()), titles, strict=True
        ):
            axis.imshow(
                shown,
                cmap="gray" if shown is image else "viridis",
                vmin=0,
                vmax=255 if shown is image else 1,
            )
            axis.set_title(title, fontsize=10, pad=6)
            axis.set_axis_off()
        figure.savefig(
            given.output,
            dpi=80,
            bbox_inches="tight",
            facecolor="white",
            metadata={"Software": None},
        )


if __name__ == "__main__":
    main()
