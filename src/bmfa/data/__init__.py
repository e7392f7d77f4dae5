"""Images and annotations in their usual layouts, and the embedded images, which are drawn."""

from bmfa.data.classification import EmbeddedImages, LabelledImage, LabelledImages
from bmfa.data.coco import InstanceFiles
from bmfa.data.drawn.badges import BADGE_CLASSES, BadgeImage, draw_badge, draw_badge_batch
from bmfa.data.drawn.objects import EmbeddedObjects, draw_object
from bmfa.data.drawn.scenes import EmbeddedScenes, draw_scene
from bmfa.data.images import ImageError, ImageFiles
from bmfa.data.instances import AnnotationError, Instance, InstanceImage, InstanceSource, Tally
from bmfa.data.probes import MODES, ProbeBlock, ProbeSettings, probe_blocks

__all__ = [
    "BADGE_CLASSES",
    "MODES",
    "AnnotationError",
    "BadgeImage",
    "EmbeddedImages",
    "EmbeddedObjects",
    "EmbeddedScenes",
    "ImageError",
    "ImageFiles",
    "Instance",
    "InstanceFiles",
    "InstanceImage",
    "InstanceSource",
    "LabelledImage",
    "LabelledImages",
    "ProbeBlock",
    "ProbeSettings",
    "Tally",
    "draw_badge",
    "draw_badge_batch",
    "draw_object",
    "draw_scene",
    "probe_blocks",
]
