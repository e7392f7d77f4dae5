"""The decoder of a saliency model, and the agreement of its masks."""

import os
from collections import OrderedDict

from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.weights import read_state_dict

THRESHOLD = 0.5  # saliency from which on a pixel belongs to the mask
STAGES = 3  # each doubles the height and the width


def saliency_decoder(channels: tuple[int, ...]) -> nn.Sequential:
    """Return three stages of transposed convolution, batch norm and ReLU, then a 1x1 convolution.

    Args:
        channels: Channels of the features, and after each of the transposed convolutions.

    Returns:
        A module from (B, C, H, W) features to (B, 1, 8 H, 8 W) saliency, by a sigmoid.

    Example:
        >>> import torch
        >>> decoder = saliency_decoder((8, 4, 4, 2)).eval()
        >>> decoder(torch.zeros(1, 8, 4, 6)).shape
        torch.Size([1, 1, 32, 48])
    """
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for stage in range(1, STAGES + 1):
        before, after = channels[stage - 1 : stage + 1]
        modules[f"upconv{stage}"] = nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)
        modules[f"bn{stage}"] = nn.BatchNorm2d(after)
        modules[f"relu{stage}"] = nn.ReLU()
    modules["final_conv"] = nn.Conv2d(channels[-1], 1, kernel_size=1)
    modules["sigmoid"] = nn.Sigmoid()
    return nn.Sequential(modules)


def load_decoder(path: str | os.PathLike[str]) -> nn.Sequential:
    """Load a decoder from a file of weights, in float32.

    Args:
        path: A safetensors file or a state dict with keys such as `decoder.upconv1.weight`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file holds anything but the weights of a decoder.
    """
    found = {name.removeprefix("decoder."): x for name, x in read_state_dict(path).items()}
    weights = [found.get(f"upconv{stage}.weight") for stage in range(1, STAGES + 1)]
    shapes = [tuple(x.shape) for x in weights if x is not None and x.dim() == 4]
    if len(shapes) < STAGES:
        raise ValueError(
            f"{path} is not a saliency decoder: upconv1 to upconv{STAGES} are not all there; pass the "
            "weights of the model's decoder"
        )
    decoder = saliency_decoder((shapes[0][0], *(shape[1] for shape in shapes)))
    # Files of weights leave out the counter of batches, which is for training.
    counters = {n: x for n, x in decoder.state_dict().items() if n.endswith("num_batches_tracked")}
    try:
        decoder.load_state_dict(counters | found)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a saliency decoder: {reason}") from None
    return decoder.eval()


def masks(decoder: nn.Module, features: Tensor, grid: Grid, prefix: int) -> Tensor:
    """Return (B, 1, 8 H, 8 W) bool masks from (B, prefix + N, C) features, computed in float32."""
    spatial = features[:, prefix:].float().transpose(1, 2)
    maps = spatial.reshape(*spatial.shape[:2], grid.height, grid.width)
    mask: Tensor = decoder(maps) > THRESHOLD
    return mask
