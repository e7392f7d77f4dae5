"""Vision Transformers: load, patch, record and reduce them."""

from bmfa.models.loading import LoadedModel, load_model
from bmfa.models.patching import layer_indices, patch, unpatch
from bmfa.models.preprocessing import Preprocessing
from bmfa.models.recording import LayerRecord, Recording, record
from bmfa.models.reducing import final_tokens, reduce, unmerge
from bmfa.models.reduction_plan import ReductionPlan
from bmfa.models.summarizing import BlockSummary, LayerSummary, Summary, summary
from bmfa.models.tuning_reduction import tune_reduction

__all__ = [
    "BlockSummary",
    "LayerRecord",
    "LayerSummary",
    "LoadedModel",
    "Preprocessing",
    "Recording",
    "ReductionPlan",
    "Summary",
    "final_tokens",
    "layer_indices",
    "load_model",
    "patch",
    "record",
    "reduce",
    "summary",
    "tune_reduction",
    "unmerge",
    "unpatch",
]
