#!/bin/sh
# The first hour with bmfa, from a clean environment to a plan in service.
#
# Run it in an empty folder:        sh PATH/TO/CHECKOUT/examples/first_hour.sh
# with a wheel or another package:  sh .../first_hour.sh bmfa-0.1.0-....whl
#
# It makes what is missing in the current folder: .venv, weights.safetensors (DeiT-Tiny with random
# weights: speeds are real, errors say nothing about a trained model) and photos/ (drawn images). Put
# your own weights and images there instead. MODEL, SIZE and MINUTES change the model, the side of its
# images in pixels, and the time of tuning.
set -eu

checkout=$(cd "$(dirname "$0")/.." && pwd)
package=${1:-$checkout}
export MODEL="${MODEL:-deit_tiny_patch16_224}" SIZE="${SIZE:-768}"

echo "== Install"
test -x .venv/bin/python || python3 -m venv .venv
.venv/bin/python -m pip install --quiet "$package[models]"
# Only for a torchvision that does not fit a CPU build of torch; does nothing elsewhere.
.venv/bin/python "$checkout/tools/torchvision_operators.py"

echo "== Weights and images"
.venv/bin/python - <<'PYTHON'
import os
from pathlib import Path

import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from bmfa.data import EmbeddedImages

if not Path("weights.safetensors").exists():
    torch.manual_seed(0)
    save_file(timm.create_model(os.environ["MODEL"]).state_dict(), "weights.safetensors")
if not Path("photos").exists():
    Path("photos").mkdir()
    for index, image in enumerate(EmbeddedImages(8, size=int(os.environ["SIZE"]))):
        Image.fromarray(image.pixels).save(f"photos/{index}.png")
PYTHON

echo "== Will it help? (seconds)"
.venv/bin/bmfa estimate --model "timm:$MODEL" --weights weights.safetensors --img-size "$SIZE" \
  --data-dir photos --json estimate.json

echo "== A plan, for at most 3 % change of the features (minutes)"
.venv/bin/bmfa tune --model "timm:$MODEL" --weights weights.safetensors --img-size "$SIZE" \
  --data-dir photos --tolerance 0.03 --minutes "${MINUTES:-3}" --save plan.json

echo "== The plan in a fresh process, in a model of timm"
.venv/bin/python - <<'PYTHON'
import os

import timm
import torch

import bmfa

size = int(os.environ["SIZE"])
# With the published weights, pretrained=True is enough.
weights = {"file": "weights.safetensors"}
model = timm.create_model(
    os.environ["MODEL"], img_size=size, pretrained=True, pretrained_cfg_overlay=weights
).eval()
pixels = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
with torch.inference_mode():
    before = model(pixels)
    bmfa.patch(model, plan="plan.json")
    patched = model(pixels)
    print(bmfa.summary(model))
    bmfa.unpatch(model)
    after = model(pixels)
print(f"class scores moved by {float((patched - before).norm() / before.norm()):.2g}")
print(f"bit-identical after unpatch: {torch.equal(before, after)}")
PYTHON
