"""Whether a patched model in service still changes few outputs by more than a tolerance."""

import json
import math
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bmfa.attention.tiling import DEFAULT_ERROR
from bmfa.checks import check_integer, check_number, is_compiling
from bmfa.models.measures import Function, Measure, find_measure
from bmfa.models.patching import copy_sharing_weights, unpatch
from bmfa.models.screened_layer import screened_layers

Action = Literal["warn", "tighten", "restore"]
# What an alarm has done, as its warning says it.
_DONE: dict[str, str] = {
    "warn": "nothing was changed",
    "tighten": "the error targets were halved",
    "restore": "the model was restored",
}
# Inputs that wait for a check, at most; a later one replaces the first of them. Each holds an image.
MOST_KEPT = 8
# Inputs between the starts of two counts. A shift is found at most this many inputs later than by a
# count that begins with it; each start makes the level of the next ones smaller.
START_EVERY = 32
# Factor of the error targets after an alarm; layers whose target falls below the least run exactly.
TIGHTEN, LEAST_ERROR = 0.5, 0.002


def log_evidence(exceeded: int, count: int, share: float) -> float:
    """Return the logarithm of the evidence against a share of inputs, from a count of them.

    The evidence is the likelihood of the outcomes under a Beta(1/2, 1/2) mixture of shares, divided by
    that under the share p: with s of n inputs beyond the tolerance

        M_n(p) = B(s + 1/2, n - s + 1/2) / (B(1/2, 1/2) p^s (1 - p)^(n - s)),

    B the beta function. If p is the true share, M_n is a martingale that begins at 1, so the probability
    that it ever reaches 1 / alpha is at most alpha (Ville 1939), whenever and however often one looks.
    The mixture is that of Robbins (1970, "Statistical methods related to the law of the iterated
    logarithm"); Howard, Ramdas, McAuliffe and Sekhon (2021, "Time-uniform, nonparametric, nonasymptotic
    confidence sequences") study the sequences of intervals that it gives.

    Args:
        exceeded: The number s of inputs whose change exceeds the tolerance.
        count: The number n of inputs.
        share: The share p, in (0, 1).
    """
    passed = count - exceeded
    beta = math.lgamma(exceeded + 0.5) + math.lgamma(passed + 0.5) - math.lgamma(count + 1.0)
    likelihood = exceeded * math.log(share) + passed * math.log1p(-share)
    return beta - math.log(math.pi) - likelihood


def confidence_bounds(exceeded: int, count: int, level: float) -> tuple[float, float]:
    """Return the shares that a count does not exclude: all p with M_n(p) < 1 / level, an interval.

    The intervals of all n together contain the true share with a probability of at least 1 - level.
    """
    observed, ends = (exceeded + 0.5) / (count + 1.0), []
    for end in (0.0, 1.0):
        inside, outside = observed, end
        while inside != (middle := (inside + outside) / 2.0) != outside:
            if log_evidence(exceeded, count, middle) < -math.log(level):
                inside = middle
            else:
                outside = middle
        ends.append(outside)
    return ends[0], ends[1]


@dataclass(eq=False)
class ShareTest:
    """A test, valid at all times, that the share of inputs beyond the tolerance is at most `allowed`.

    A count begins with the first input and after every START_EVERY further ones, so that a long history
    does not hide a shift. The j-th count has the level alpha / (j (j + 1)); the sum of all is alpha, so
    that a true share of at most `allowed` ever raises an alarm with a probability of at most alpha.

    Args:
        allowed: The largest share, in (0, 1).
        level: The level alpha, in (0, 1).
    """

    allowed: float
    level: float
    count: int = 0
    exceeded: int = 0
    # Counts that began: the inputs before them, how many of these exceeded, and the level.
    starts: list[tuple[int, int, float]] = field(default_factory=list)
    begun: int = 0

    def add(self, exceeds: bool) -> bool:
        """Count an input; return True if the share is above what is allowed."""
        if self.count % START_EVERY == 0:
            self.begun += 1
            level = self.level / (self.begun * (self.begun + 1))
            self.starts.append((self.count, self.exceeded, level))
        self.count += 1
        self.exceeded += exceeds
        return exceeds and any(self._excludes(*start) for start in self.starts)

    def _excludes(self, count: int, exceeded: int, level: float) -> bool:
        count, exceeded = self.count - count, self.exceeded - exceeded
        above = exceeded > self.allowed * count
        return above and log_evidence(exceeded, count, self.allowed) >= -math.log(level)

    def bounds(self) -> tuple[float, float]:
        """Return the confidence bounds of the first count."""
        if not self.starts:
            return 0.0, 1.0
        return confidence_bounds(self.exceeded, self.count, self.starts[0][2])

    def restart(self) -> None:
        """Begin anew; the levels of the counts go on, so that alpha holds for all of them."""
        self.count = self.exceeded = 0
        self.starts.clear()

    def inputs_to_alarm(self, share: float) -> int:
        """Return a number of inputs within which a share that begins now raises an alarm.

        With q the share that is observed, log M_n(p) >= n KL(q || p) - log(n) / 2 - log(2) (Krichevsky
        and Trofimov 1981). The next count begins at most START_EVERY inputs later.
        """
        kl = share * math.log(share / self.allowed)
        kl += (1.0 - share) * math.log((1.0 - share) / (1.0 - self.allowed)) if share < 1.0 else 0.0
        j = self.begun + 1
        needed, n = math.log(j * (j + 1) / self.level) + math.log(2.0), 1
        while n * kl < needed + math.log(n) / 2.0:
            n += 1
        return n + (-self.count) % START_EVERY


@dataclass(frozen=True, repr=False)
class MonitorState:
    """What a monitor has seen; `monitor.state` makes these.

    Attributes:
        holds: False from the first alarm on.
        passes: Passes of the model.
        kept: Inputs that were kept for a check.
        dropped: Inputs that were replaced by later ones before they were checked.
        checked: Inputs that were checked.
        exceeded: Inputs among `count` whose change exceeds the tolerance.
        count: Inputs that were checked since the settings of the model changed last.
        share: `exceeded / count`; None before the first input.
        low: Lower confidence bound of the share, valid at all times.
        high: Upper confidence bound.
        largest_change: The largest change of an input among `count`.
        alarms: How often the tolerance was found not to hold.
        tolerance: The largest change that is accepted.
        allowed: The largest share of inputs whose change may exceed it.
        level: Probability of a false alarm, at most, at all times together.
        failure: Why checks have ended, or "".

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.03)
        >>> with bmfa.monitor(model, every=1, background=False) as monitor:
        ...     _ = model(torch.zeros(1, 3, 112, 112))
        ...     state = monitor.check()
        >>> state
        MonitorState(holds, 0 of 1 inputs beyond 0.05: share 0.0000 to 0.9975, allowed 0.1)
        >>> state.to_dict()["passes"]
        1
    """

    holds: bool
    passes: int
    kept: int
    dropped: int
    checked: int
    exceeded: int
    count: int
    share: float | None
    low: float
    high: float
    largest_change: float
    alarms: int
    tolerance: float
    allowed: float
    level: float
    failure: str

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a flat dictionary, whose numbers a metrics system can read.

        `passes`, `kept`, `dropped`, `checked` and `alarms` are counters, which never fall.
        """
        return asdict(self)

    def to_json(self) -> str:
        """Return the state as one line of JSON."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        return (
            f"MonitorState({'holds' if self.holds else 'does not hold'}, {self.exceeded} of "
            f"{self.count} inputs beyond {self.tolerance:g}: share {self.low:.4f} to {self.high:.4f}, "
            f"allowed {self.allowed:g})"
        )


@dataclass(eq=False, repr=False)
class Monitor:
    """Checks inputs of a patched model in service; `monitor` makes these.

    It is a context manager, and a forward pre-hook of the model. Copies and pickles of the model are not
    monitored.

    Attributes:
        state: A snapshot of what the monitor has seen, a `MonitorState`.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.03)
        >>> with bmfa.monitor(model, every=2, background=False) as monitor:
        ...     for _ in range(4):
        ...         _ = model(torch.zeros(1, 3, 112, 112))
        ...     print(monitor.check().checked)
        2
    """

    model: nn.Module
    every: int
    tolerance: float
    measure: Measure
    test: ShareTest
    action: Action
    seed: int

    def __post_init__(self) -> None:
        self.dense = unpatch(copy_sharing_weights(self.model))
        self.passes = self.kept = self.dropped = self.checked = self.alarms = 0
        self.largest_change, self.failure = 0.0, ""
        self._generator = torch.Generator().manual_seed(self.seed)
        self._next = self._random(self.every)  # the pass that is checked
        self._waiting: deque[tuple[Tensor, dict[str, Any]]] = deque()
        self._lock = threading.Condition()  # an RLock, of everything above
        self._one_check = threading.RLock()  # at a time
        self._thread: threading.Thread | None = None
        self._local, self._closed = threading.local(), False
        self._handle = self.model.register_forward_pre_hook(self, with_kwargs=True)

    def _random(self, size: int) -> int:
        return int(torch.randint(size, (), generator=self._generator))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a pass, and keep one of its images if it is to be checked."""
        if is_compiling() or module.training or getattr(self._local, "checks", False):
            return
        with self._lock:
            index, self.passes = self.passes, self.passes + 1
            if index != self._next:
                return
            self._next = (index // self.every + 1) * self.every + self._random(self.every)
            if not screened_layers(module):
                return  # it was unpatched, and may be patched again
            images, options = _find_images(args, kwargs)
            if images is None:
                return self._end("its inputs are not (N, 3, height, width) images")
            row, batch = self._random(len(images)), images.shape[0]
            image = images[row : row + 1].detach().clone()
            options = {
                name: x[row : row + 1] if isinstance(x, Tensor) and x.shape[:1] == (batch,) else x
                for name, x in options.items()
            }
            self._waiting.append((image, options))
            self.kept += 1
            if len(self._waiting) > MOST_KEPT:
                self._waiting.popleft()
                self.dropped += 1
            self._lock.notify()

    def check(self) -> MonitorState:
        """Check the inputs that wait, in this thread.

        Returns:
            The state afterwards.

        Raises:
            ValueError: If the measure does; the input does not count.

        Example:
            >>> import bmfa
            >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.03)
            >>> bmfa.monitor(model, background=False).check().checked
            0
        """
        with self._one_check:
            while True:
                with self._lock:
                    if not self._waiting:
                        return self.state
                    kept = self._waiting.popleft()
                if screened_layers(self.model):  # not unpatched since then
                    self._count(self._change(*kept))

    def _change(self, image: Tensor, options: Mapping[str, Any]) -> float:
        """Return the change of the output for an image, which is run both ways."""
        self._local.checks = True
        try:
            with torch.no_grad():
                exact = self.measure.outputs(self.dense, image, options)
                screened = self.measure.outputs(self.model, image, options)
                return self.measure.change(max(self.measure.compare(exact, screened), 0.0))
        finally:
            self._local.checks = False

    def _count(self, change: float) -> None:
        """Count an input, and act if the tolerance no longer holds."""
        with self._lock:
            self.checked += 1
            self.largest_change = max(self.largest_change, change)
            above = self.test.add(not change <= self.tolerance)  # NaN is above, too
            if not above or (self.alarms and self.action == "warn"):
                return
            self.alarms += 1
            state = self.state
            if self.action == "tighten":
                _tighten(self.model)
                self.test.restart()
                self.largest_change = 0.0
            elif self.action == "restore":
                unpatch(self.model)
        warnings.warn(
            f"the patched model changes {self.measure.name} by more than {self.tolerance:g} for more "
            f"than {100 * self.test.allowed:g} % of the inputs ({state.exceeded} of {state.count}, the "
            f"largest change is {state.largest_change:.3g}); {_DONE[self.action]}: tune the model on "
            "such inputs with bmfa.tune",
            stacklevel=3,
        )

    def run_in_background(self) -> threading.Thread:
        """Check inputs in a thread of its own, which is returned, until the monitor is closed."""
        self._thread = threading.Thread(target=self._run, name="bmfa-monitor", daemon=True)
        self._thread.start()
        return self._thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            try:
                self.check()
            except Exception as error:
                return self._end(f"{type(error).__name__}: {error}")

    def _end(self, failure: str) -> None:
        """End all checks, and warn: a service goes on."""
        self.failure = failure
        self._stop()
        warnings.warn(f"the model is no longer monitored: {failure}", stacklevel=3)

    def close(self) -> None:
        """End the checks, and remove the hook; inputs that wait are not checked.

        Example:
            >>> import bmfa
            >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.03)
            >>> bmfa.monitor(model).close()
        """
        self._stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _stop(self) -> None:
        self._handle.remove()
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._lock.notify_all()

    @property
    def state(self) -> MonitorState:
        """A snapshot of what the monitor has seen."""
        with self._lock:
            test, (low, high) = self.test, self.test.bounds()
            share = test.exceeded / test.count if test.count else None
            found = vars(test) | vars(self)
            found |= {"holds": not self.alarms, "share": share, "low": low, "high": high}
            return MonitorState(**{one.name: found[one.name] for one in fields(MonitorState)})

    def passes_to_alarm(self, share: float = 1.0) -> int:
        """Return a number of passes within which a shift of the inputs that begins now is found.

        With q the share of the inputs whose change then exceeds the tolerance, p that which is allowed,
        and alpha the level of a count that begins (`ShareTest`), it takes at most n inputs with
        n KL(q || p) >= log(1 / alpha) + log(n) / 2 + log(2), after at most START_EVERY - 1 that the
        next count begins later, and the passes between them.

        Args:
            share: The share q that is observed, above the allowed one.

        Returns:
            The number of passes.

        Example:
            >>> import bmfa
            >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.03)
            >>> bmfa.monitor(model, every=100, background=False).passes_to_alarm(1.0)
            400
        """
        share = check_number("share", share, low=self.test.allowed, high=1.0, open_low=True)
        with self._lock:
            return self.every * (1 + self.test.inputs_to_alarm(share))

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Monitor(every={self.every}, {self.state!r})"

    def __reduce__(self) -> Any:
        return partial, (_ignore,)


def monitor(
    model: nn.Module,
    every: int = 100,
    tolerance: float = 0.05,
    measure: str | Function = "features",
    *,
    allowed: float = 0.1,
    level: float = 0.01,
    action: Action = "warn",
    background: bool = True,
    seed: int = 0,
) -> Monitor:
    """Check in service that a patched model still changes few outputs by more than a tolerance.

    Of every `every` passes, one is chosen at random, and one image of its input is kept. Later it runs
    through the model as it is and through a dense copy that shares the weights, and the change of the
    output is measured as `bmfa.tune` does. No pass waits for that: it happens in a background thread, or
    where `check()` is called. A kept image costs a dense and a screened pass over it.

    The statistic is the share of the images whose change exceeds `tolerance`. A confidence sequence
    (`bmfa.models.monitoring.log_evidence` has the formula), which is valid at all times together, says
    whether it is above `allowed`: with a probability of at most `level` there is ever an alarm if it is
    not. At an alarm the monitor warns, once for each change of the settings, and does what `action`
    says. `monitor.state` has the counts and bounds.

    A layer in which a pass is running when the settings change finishes with the former ones. After
    `bmfa.unpatch` nothing is checked until the model is patched again, which goes on with the same
    counts; begin another monitor for another plan. Calls of `model(...)` count; those of its parts,
    passes in compiled graphs and training do not.

    Args:
        model: A patched model whose first argument is images, (N, 3, height, width).
        every: One pass in as many is checked.
        tolerance: The largest change of the output of an image that is accepted, above 0. The tolerance
            of a plan is for the mean over images; the changes of images differ by a factor of up to 3.
        measure: `"features"`, `"logits"` or a function of two outputs, as in `bmfa.tune`.
        allowed: The largest share of images whose change may exceed the tolerance, in (0, 1).
        level: The largest probability of a false alarm, alpha, in (0, 1).
        action: `"warn"`; `"tighten"` also halves all error targets and begins anew; `"restore"` also
            calls `bmfa.unpatch`.
        background: True checks in a thread; False leaves it to `check()`.
        seed: Seed of the choice of passes and images.

    Returns:
        A `Monitor`, which is a context manager; `close()` ends it.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, the model is not patched, or `action` is
            `"tighten"` and the layers have no error targets.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.03)
        >>> with bmfa.monitor(model, every=10, tolerance=0.05) as monitor:
        ...     for _ in range(20):
        ...         _ = model(torch.zeros(1, 3, 112, 112))
        >>> monitor.state.passes, monitor.state.holds
        (20, True)
    """
    every = check_integer("every", every, low=1)
    tolerance = check_number("tolerance", tolerance, low=0.0, open_low=True)
    for name, value in (("allowed", allowed), ("level", level)):
        if check_number(name, value, low=0.0, high=1.0, open_low=True) == 1.0:
            raise ValueError(f"{name} is {value}; pass a fraction below 1, such as 0.1")
    if action not in _DONE:
        raise ValueError(f"action is {action!r}; pass 'warn', 'tighten' or 'restore'")
    layers = screened_layers(model)
    if not layers:
        raise ValueError("the model is not patched; call bmfa.patch(model) first")
    if action == "tighten" and any(
        x.options.get("rule") or x.options.get("leaves") for x in layers
    ):
        raise ValueError(
            "action is 'tighten', and layers have a rule or leaves in place of an error target; pass "
            "action='restore', or patch the model with error= or a plan"
        )
    test = ShareTest(float(allowed), float(level))
    seed = check_integer("seed", seed, low=0)
    made = Monitor(model, every, tolerance, find_measure(measure), test, action, seed)
    if background:
        made.run_in_background()
    return made


def _find_images(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the images among the arguments of a pass, None if there are none, and the others."""
    options = dict(kwargs)
    name = next((name for name, x in options.items() if isinstance(x, Tensor)), None)
    images = args[0] if len(args) == 1 else None if name is None or args else options.pop(name)
    found = isinstance(images, Tensor) and images.dim() == 4 and len(images) > 0
    return images if found else None, options


def _tighten(model: nn.Module) -> None:
    """Lower the error targets of all layers, in place."""
    for layer in screened_layers(model):
        error = layer.options.get("error")
        error = TIGHTEN * (DEFAULT_ERROR if error is None else error)
        layer.options = layer.options | {"error": error if error >= LEAST_ERROR else 0.0}
        layer.choices = {}


def _ignore(module: nn.Module, args: Any, kwargs: Any) -> None:
    """In place of a monitor, the hook of a copy of a model."""
