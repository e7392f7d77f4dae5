"""Pictures and annotations in their usual layouts, and the embedded picture set."""

from bmfa.data.annotations import AnnotationFile
from bmfa.data.coco_writer import write_coco
from bmfa.data.drawn.embedded import FigurePicture, figure_batch, figure_picture
from bmfa.data.drawn.figures import CLASSES
from bmfa.data.drawn.scenes import EmbeddedScenes, scene
from bmfa.data.files import InstanceFiles
from bmfa.data.instances import AnnotationError, Instance, InstanceSource, Picture, Tally
from bmfa.data.pictures import PictureError, PictureFiles
from bmfa.data.probe_stream import probe_blocks
from bmfa.data.probes import MODES, ProbeBlock, ProbeSettings

__all__ = [
    "CLASSES",
    "MODES",
    "AnnotationError",
    "AnnotationFile",
    "EmbeddedScenes",
    "FigurePicture",
    "Instance",
    "InstanceFiles",
    "InstanceSource",
    "Picture",
    "PictureError",
    "PictureFiles",
    "ProbeBlock",
    "ProbeSettings",
    "Tally",
    "figure_batch",
    "figure_picture",
    "probe_blocks",
    "scene",
    "write_coco",
]
