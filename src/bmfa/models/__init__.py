"""Vision Transformers: load, patch, tune, record and reduce them."""

from bmfa.models.described import register_model
from bmfa.models.estimating import Estimate, SettingEstimate, estimate
from bmfa.models.loading import LoadedModel, load_model
from bmfa.models.monitoring import Monitor, MonitorState, monitor
from bmfa.models.patching import layer_indices, patch, unpatch
from bmfa.models.plan import ModelFingerprint, Plan, ReductionPlan
from bmfa.models.preprocessing import Preprocessing
from bmfa.models.recording import LayerRecord, Recording, record
from bmfa.models.reducing import final_tokens, reduce, unmerge
from bmfa.models.search import LayerSetting
from bmfa.models.summarizing import BlockSummary, LayerSummary, Summary, summary
from bmfa.models.transformers_attention import register_attention
from bmfa.models.tuning import tune
from bmfa.models.tuning_reduction import tune_reduction

__all__ = [
    "BlockSummary",
    "Estimate",
    "LayerRecord",
    "LayerSetting",
    "LayerSummary",
    "LoadedModel",
    "ModelFingerprint",
    "Monitor",
    "MonitorState",
    "Plan",
    "Preprocessing",
    "Recording",
    "ReductionPlan",
    "SettingEstimate",
    "Summary",
    "estimate",
    "final_tokens",
    "layer_indices",
    "load_model",
    "monitor",
    "patch",
    "record",
    "reduce",
    "register_attention",
    "register_model",
    "summary",
    "tune",
    "tune_reduction",
    "unmerge",
    "unpatch",
]
