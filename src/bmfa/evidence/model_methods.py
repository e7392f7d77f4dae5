"""Methods on a model: parse a name, and apply it to the model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from bmfa import merging
from bmfa.evidence.methods import FULL, is_kind, names
from bmfa.models import LoadedModel, layer_indices, patch, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.patching import copy_sharing_weights as copy_sharing_weights
from bmfa.models.plan import Plan, PlanFile, ReductionPlan
from bmfa.models.reducing import reduce
from bmfa.trees import rules

PLAN = "plan:"  # a method that is the plan of a file
Layers = str | Sequence[int]  # "all", "last-K" or indices


@dataclass(frozen=True)
class ModelMethod:
    """A parsed method: a rule, a policy, a plan, or none of them for the unchanged model."""

    name: str
    rule: rules.Rule | None = None
    policy: merging.Policy | None = None
    plan: PlanFile | None = None

    @property
    def random(self) -> bool:
        """True if it draws for every image; random pooling draws once for all of them."""
        return isinstance(self.rule, rules.RandomQuadrants)


def parse(name: str, seed: int = 0) -> ModelMethod:
    """Parse `full`, a rule, a reduction, or `plan:FILE`.

    Raises:
        ValueError: If the name is unknown or its value is out of range, or the file is not a plan.
        OSError: If the file cannot be read.

    Example:
        >>> parse("tome:8").policy is not None
        True
    """
    if name == FULL:
        return ModelMethod(name)
    if name.startswith(PLAN):
        plan = PlanFile.load(name.removeprefix(PLAN))
        policy = plan.reduction if isinstance(plan, ReductionPlan) else None
        return ModelMethod(name, policy=policy, plan=plan)
    if is_kind(name, "rule"):
        return ModelMethod(name, rule=rules.parse(name, seed))
    if is_kind(name, "reduction"):
        return ModelMethod(name, policy=merging.parse(name, seed))
    raise ValueError(
        f"method {name!r} is unknown; pass {FULL}, a rule NAME:VALUE ({', '.join(names(['rule']))}) "
        f"or a reduction NAME:VALUE ({', '.join(names(['reduction']))})"
    )


def check_methods(methods: Sequence[str], model: nn.Module, layers: Layers) -> list[str]:
    """Return `full`, then every other method once; raise ValueError for names or layers unknown."""
    if not methods:
        raise ValueError("no methods; pass some, e.g. full, optimal:0.002, free-energy:8")
    for name in methods:
        parse(name)
    layer_indices(layers, len(find_vision_transformer(model).attentions))
    return list(dict.fromkeys((FULL, *methods)))


def apply(
    model: nn.Module, name: str, layers: Layers, seed: int = 0, *, dense: bool | None = None
) -> ModelMethod:
    """Replace the patches of a model: a rule is applied in `layers`, a reduction where it chooses.

    `dense` is that of `bmfa.reduce`.
    """
    method = parse(name, seed)
    unpatch(model)
    if isinstance(method.plan, Plan):
        patch(model, plan=method.plan)
    elif isinstance(method.plan, ReductionPlan):
        reduce(model, plan=method.plan, dense=dense)
    elif method.rule is not None:
        patch(model, rule=method.rule, layers=layers)
    elif method.policy is not None:
        reduce(model, method.policy, dense=dense)
    return method


@contextmanager
def applied(
    model: nn.Module, name: str, layers: Layers, seed: int = 0, *, dense: bool | None = None
) -> Iterator[ModelMethod]:
    """Apply a method inside the block as `apply` does; afterwards the model has no patch."""
    try:
        yield apply(model, name, layers, seed, dense=dense)
    finally:
        unpatch(model)


def class_names(model: LoadedModel) -> Sequence[str] | int | None:
    """Return the names of the outputs of a model, else their number, else None."""
    return model.classes or getattr(model.model, "num_classes", None) or None


def class_name(model: LoadedModel, index: int) -> str:
    """Return the name of an output of a model, `class INDEX` if it has none."""
    names = model.classes or ()
    return names[index] if index < len(names) else f"class {index}"


def predicted_class(model: LoadedModel, logits: Tensor) -> tuple[str, float]:
    """Return the predicted class of the first image and its probability in percent."""
    shares = logits[0].double().log_softmax(-1).exp()
    index = int(shares.argmax())
    return class_name(model, index), 100 * float(shares[index])
