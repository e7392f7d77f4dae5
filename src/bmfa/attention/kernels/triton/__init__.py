"""Fused Triton kernels for CUDA devices, imported on first use."""

import torch

from bmfa.packages import is_installed, load_package

# Ampere is the first architecture with the TF32 and bfloat16 matrix units that the kernels use.
LEAST_CAPABILITY = (8, 0)


def unsupported_reason(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on a device, or None if one can."""
    reason: str | None = _unsupported_reason(device)
    return reason


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unsupported_reason(device: torch.device) -> str | None:
    if not is_installed("triton"):
        return "the package triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= LEAST_CAPABILITY:
            return None
        return f"compute capability {major}.{minor} is below 8.0"
    # Its interpreter runs on a CPU; it is slow, and for tests.
    interpreted = load_package("triton").knobs.runtime.interpret
    return None if interpreted else f"the device is {device.type}, and Triton needs CUDA"
