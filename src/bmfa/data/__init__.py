"""Pictures and annotations in their usual layouts, and the embedded pictures, which are drawn."""

from bmfa.data.classification import EmbeddedPictures, LabelledPicture, LabelledPictures
from bmfa.data.coco import AnnotationFile, InstanceFiles
from bmfa.data.drawn.badges import BADGE_CLASSES, BadgePicture, draw_badge, draw_badge_batch
from bmfa.data.drawn.coco_writer import write_coco
from bmfa.data.drawn.objects import EmbeddedObjects, draw_object
from bmfa.data.drawn.scenes import EmbeddedScenes, draw_scene
from bmfa.data.instances import AnnotationError, Instance, InstanceSource, Picture, Tally
from bmfa.data.pictures import PictureError, PictureFiles
from bmfa.data.probes import MODES, ProbeBlock, ProbeSettings, probe_blocks

__all__ = [
    "BADGE_CLASSES",
    "MODES",
    "AnnotationError",
    "AnnotationFile",
    "BadgePicture",
    "EmbeddedObjects",
    "EmbeddedPictures",
    "EmbeddedScenes",
    "Instance",
    "InstanceFiles",
    "InstanceSource",
    "LabelledPicture",
    "LabelledPictures",
    "Picture",
    "PictureError",
    "PictureFiles",
    "ProbeBlock",
    "ProbeSettings",
    "Tally",
    "draw_badge",
    "draw_badge_batch",
    "draw_object",
    "draw_scene",
    "probe_blocks",
    "write_coco",
]
