"""Make `import torchvision` succeed beside a build of torch without CUDA; `make setup` runs this file.

The torchvision wheel of the package index is built against CUDA. Beside a CPU build of torch its
compiled library does not load, `import torchvision` fails because the operators `torchvision::nms` and
`torchvision::qnms` do not exist, and timm and the vision models of transformers fail with it. Run as a
script, this file looks for that failure in the environment of its interpreter and, if it finds it,
copies itself there with a `.pth` file that imports the copy whenever Python starts. The copy loads
nothing: it adds an import hook that declares the two operators just before torchvision uses them.
Calling them still raises torchvision's own error, and where the library loads, the hook does nothing.
"""

import sys
import sysconfig
from importlib import import_module
from pathlib import Path

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared = []


class OperatorFinder:
    """Import hook that finds no module and declares the operators when torchvision needs them."""

    def find_spec(self, name, path=None, target=None):
        """Declare the operators if torchvision is about to register implementations for them."""
        if name == "torchvision._meta_registrations":
            declare_operators()


def declare_operators():
    """Declare the operators unless torchvision's compiled library has done so."""
    import torch

    import_module("torchvision.extension")  # loads the library if it can
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        _declared.append(library)  # declarations last as long as this object


def is_needed():
    """True if torchvision is installed beside a CPU build of torch that it does not fit."""
    import torch

    if torch.version.cuda is not None:
        return False
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        return False
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        return True
    return False


def install(folder):
    """Copy this file, and a `.pth` file that imports it, into a folder of site packages."""
    source = Path(__file__)
    (folder / source.name).write_text(source.read_text("utf-8"), "utf-8")
    (folder / source.with_suffix(".pth").name).write_text(f"import {source.stem}\n", "utf-8")


if __name__ == "__main__":
    if is_needed():
        install(Path(sysconfig.get_path("purelib")))
elif not any(type(finder).__name__ == OperatorFinder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, OperatorFinder())
