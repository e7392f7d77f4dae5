"""The decoder of a saliency model, and the agreement of its masks."""

import os
from typing import Any

from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.weights import read_state_dict

THRESHOLD = 0.5  # saliency from which on a pixel belongs to the mask
STAGES = 3  # each doubles the height and the width


class SaliencyDecoder(nn.Module):
    """Three transposed convolutions, each with batch norm and ReLU, a 1x1 convolution and a sigmoid.

    Args:
        channels: Channels of the features, and after each of the transposed convolutions.

    Example:
        >>> decoder = SaliencyDecoder((8, 4, 4, 2)).eval()
        >>> decoder(torch.zeros(1, 8, 4, 6)).shape
        torch.Size([1, 1, 32, 48])
    """

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        for stage in range(STAGES):
            before, after = channels[stage : stage + 2]
            upconv = nn.ConvTranspose2d(before, after, kernel_size=4, stride=2, padding=1)
            self.add_module(f"upconv{stage + 1}", upconv)
            self.add_module(f"bn{stage + 1}", nn.BatchNorm2d(after))
        self.final_conv = nn.Conv2d(channels[-1], 1, kernel_size=1)

    def forward(self, features: Tensor) -> Tensor:
        """Return (B, 1, 8 H, 8 W) saliency between 0 and 1 from (B, C, H, W) features."""
        x = features
        for stage in range(1, STAGES + 1):
            x = getattr(self, f"bn{stage}")(getattr(self, f"upconv{stage}")(x)).relu()
        saliency: Tensor = self.final_conv(x).sigmoid()
        return saliency


def load_decoder(path: str | os.PathLike[str]) -> SaliencyDecoder:
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
    decoder = SaliencyDecoder((shapes[0][0], *(shape[1] for shape in shapes)))
    try:
        result: Any = decoder.load_state_dict(found, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a saliency decoder: {error}") from None
    # Files of weights leave out the counter of batches, which is for training.
    missing = [name for name in result.missing_keys if not name.endswith("num_batches_tracked")]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"{path} is not a saliency decoder: missing {missing or 'nothing'}, unexpected "
            f"{result.unexpected_keys or 'nothing'}"
        )
    return decoder.eval()


def masks(decoder: SaliencyDecoder, features: Tensor, grid: Grid, prefix: int) -> Tensor:
    """Return (B, 1, 8 H, 8 W) bool masks from (B, prefix + N, C) features, computed in float32."""
    spatial = features[:, prefix:].float().transpose(1, 2)
    maps = spatial.reshape(*spatial.shape[:2], grid.height, grid.width)
    mask: Tensor = decoder(maps) > THRESHOLD
    return mask
