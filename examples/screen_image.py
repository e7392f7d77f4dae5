"""Screen the attention of a model on one image and draw the tree of one query as text.

Run with: python examples/screen_image.py
"""

import torch

import bmfa
from bmfa.data import EmbeddedImages

loaded = bmfa.load_model("embedded")  # 8 layers, 3 heads, a 16x16 grid and one class token
image = next(iter(EmbeddedImages(1)))
pixels = loaded.preprocess(image.pixels)[None]  # (1, 3, 128, 128)

with torch.inference_mode():
    bmfa.patch(loaded.model, rule=bmfa.rules.Optimal(0.002), layers="last-4")
    with bmfa.record(loaded.model) as recording:
        logits = loaded.logits(pixels)
    bmfa.unpatch(loaded.model)
    full = loaded.logits(pixels)

print(f"Image: {image.label_name}")
print(f"Prediction with screened attention: {loaded.classes[logits.argmax()]}")
print(f"Prediction with full attention:     {loaded.classes[full.argmax()]}")
print(f"Leaves: {recording.leaf_ratio:.1%} of the tokens; KL of attention: {recording.error:.4f}")

layer = max(recording.layers)
tree = recording[layer].trees[0][0, 0, 0]  # the tree of image 0, head 0, class token
print(f"Tree of the class token in layer {layer}, head 0: {tree}")
sizes = torch.bincount(tree.leaf_index.long())[tree.leaf_index.long()].view(16, 16)
print("Tokens in the leaf of each token ('.' is a single token):")
for row in sizes.tolist():
    print("  " + " ".join(f"{size:>3}" if size > 1 else "  ." for size in row))
