"""`bmfa.monitor`: its test of a share, and its place in a model that runs."""

import copy
import json
import math
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from tests.models.tuned_models import small_model, smooth_images
from torch import nn

import bmfa
from bmfa.models import Monitor, monitoring
from bmfa.models.monitoring import START_EVERY, ShareTest, log_evidence
from bmfa.models.screened_layer import screened_layers

TILES = {"error": 0.3, "allow_dense": False}


def monitored(model: nn.Module | None = None, **options) -> Monitor:
    model = bmfa.patch(small_model() if model is None else model, **TILES)
    options = {"every": 1, "tolerance": 1e-6, "background": False} | options
    return bmfa.monitor(model, **options)


def test_the_evidence_is_the_ratio_of_the_mixture_and_the_likelihood():
    nodes, weights = np.polynomial.legendre.leggauss(400)
    angles = (nodes + 1.0) * np.pi / 4.0  # shares sin^2: their density under Beta(1/2, 1/2) is even
    shares = np.sin(angles) ** 2
    for exceeded, count in ((0, 0), (0, 7), (3, 3), (5, 40), (40, 100)):
        likelihood = shares**exceeded * (1 - shares) ** (count - exceeded)
        mixture = float((weights * likelihood).sum() / 2.0)
        for share in (0.1, 0.5):
            exact = mixture / (share**exceeded * (1 - share) ** (count - exceeded))
            assert math.isclose(log_evidence(exceeded, count, share), math.log(exact), abs_tol=1e-9)


def test_bounds_are_where_the_evidence_reaches_the_level():
    for exceeded, count, level in ((0, 20, 0.05), (20, 20, 0.01), (7, 50, 0.01), (1, 1000, 0.2)):
        low, high = monitoring.confidence_bounds(exceeded, count, level)
        assert 0.0 <= low <= exceeded / count <= high <= 1.0
        for bound in (low, high):
            if 0.0 < bound < 1.0:
                found = log_evidence(exceeded, count, bound)
                assert math.isclose(found, -math.log(level), rel_tol=1e-6)
        assert (low == 0.0) == (exceeded == 0) and (high == 1.0) == (exceeded == count)
    assert ShareTest(0.1, 0.01).bounds() == (0.0, 1.0)


def test_at_most_20_of_1000_runs_without_a_shift_raise_an_alarm_at_a_level_of_1_percent():
    def alarms(level: float, runs: int, inputs: int) -> int:
        outcomes = (np.random.default_rng(seed).random(inputs) < 0.1 for seed in range(runs))
        tests = (ShareTest(0.1, level) for _ in range(runs))
        return sum(
            any(map(test.add, run.tolist())) for test, run in zip(tests, outcomes, strict=True)
        )

    assert alarms(0.01, 1000, 1000) <= 20
    assert alarms(0.3, 200, 300) > 0, "it has power"


def test_a_shift_is_found_within_the_number_of_inputs_that_the_theory_gives():
    for before in (0, 1, START_EVERY - 1, 10 * START_EVERY + 5):
        test = ShareTest(0.1, 0.01)
        assert not any(test.add(False) for _ in range(before))
        within = test.inputs_to_alarm(1.0)
        assert any(test.add(True) for _ in range(within)), before
    assert ShareTest(0.1, 0.01).inputs_to_alarm(1.0) == 3


def test_a_shift_to_a_share_is_found_as_soon_as_the_bound_on_the_evidence_says():
    found, level = [], 0.01 / (6 * 7)  # of the sixth count
    for seed in range(100):
        test = ShareTest(0.1, 0.01)
        for _ in range(5 * START_EVERY):
            test.add(False)
        within = test.inputs_to_alarm(0.5)
        outcomes, n = np.random.default_rng(seed).random(200) < 0.5, np.arange(1, 201)
        q = np.clip(outcomes.cumsum() / n, 1e-12, 1 - 1e-12)
        divergence = q * np.log(q / 0.1) + (1 - q) * np.log((1 - q) / 0.9)
        enough = n * divergence >= -math.log(level) + np.log(n) / 2 + math.log(2)
        found.append(next(i for i, one in enumerate(outcomes, 1) if test.add(bool(one))))
        assert found[-1] <= n[enough & (q > 0.1)][0]
    assert np.median(found) <= within < 30


def test_one_pass_in_k_is_kept_and_checked_against_the_dense_model():
    monitor = monitored(every=5, tolerance=10.0)
    model, batch = monitor.model, smooth_images(2)
    with torch.no_grad():
        exact = bmfa.unpatch(copy.deepcopy(model)).forward_features(batch)
        changed = model.forward_features(batch)  # not a pass of the model
        for _ in range(5 * monitoring.MOST_KEPT):
            model(batch)
    assert (monitor.passes, monitor.kept, monitor.checked) == (40, 8, 0)
    state = monitor.check()
    each = ((changed - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).tolist()
    assert (state.checked, state.exceeded, state.share) == (8, 0, 0.0) and min(each) > 1e-6
    assert math.isclose(state.largest_change, max(each), rel_tol=1e-4)
    assert monitor.passes == 40, "checks are no passes"
    for _ in range(5 * (monitoring.MOST_KEPT + 3)):
        model(batch)
    state = monitor.check()
    assert (state.kept, state.dropped, state.checked) == (19, 3, 16), "of 11, 3 were dropped"
    model.train()
    model(batch)
    assert monitor.passes == state.passes, "nor is training"


def shift(monitor: Monitor, passes: int = 1, until: int = 100) -> None:
    """Let images through, each of which changes too much, and check them, until an alarm."""
    for _ in range(passes):
        if monitor.alarms < until:
            monitor.model(smooth_images(1))
            monitor.check()


def test_a_shift_warns_once_and_the_model_stays():
    monitor = monitored(every=1)
    expected = monitor.passes_to_alarm(1.0)
    with pytest.warns(
        UserWarning, match=r"more than 1e-06 for more than 10 % .*nothing was chan"
    ) as seen:
        shift(monitor, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shift(monitor, 5)
    state = monitor.state
    assert len(seen) == 1 and not state.holds and state.alarms == 1 and state.low > 0.1
    assert len(screened_layers(monitor.model)) == 3


def test_tightening_halves_the_targets_until_attention_is_exact():
    monitor = monitored(action="tighten", tolerance=1e-12)
    targets, images = [0.3], smooth_images(1)
    for _ in range(8):
        with pytest.warns(UserWarning, match="error targets were halved"):
            shift(monitor, monitor.passes_to_alarm(), until=len(targets))
        assert monitor.state.count == 0, "a new count begins"
        assert monitor.test.begun == len(targets), "with the next level"
        targets.append(screened_layers(monitor.model)[0].options["error"])
        if targets[-1] == 0.0:
            break
    halves = [0.3 / 2**i for i in range(len(targets) - 1)]
    assert targets == [*halves, 0.0] and min(halves) >= monitoring.LEAST_ERROR > min(halves) / 2
    with torch.no_grad():
        exact = monitor.dense(images)
        torch.testing.assert_close(monitor.model(images), exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"action is 'tighten'.*leaves"):
        bmfa.monitor(bmfa.patch(small_model(), leaves=0.5), action="tighten")


def test_restoring_gives_the_bits_of_the_model_back_and_a_new_patch_is_monitored():
    model, images = small_model(), smooth_images(1)
    exact = model(images)
    monitor = monitored(model, action="restore")
    with pytest.warns(UserWarning, match="the model was restored"):
        shift(monitor, 5)
    assert torch.equal(model(images), exact) and not screened_layers(model)
    before = monitor.state
    shift(monitor, 3)
    assert monitor.state.checked == before.checked and monitor.state.passes == before.passes + 3
    bmfa.patch(model, **TILES)
    with pytest.warns(UserWarning, match="the model was restored"):
        shift(monitor, 5)
    assert monitor.state.checked > before.checked and monitor.state.alarms == 2
    bmfa.patch(model, **TILES)
    model(images)
    bmfa.unpatch(model)
    assert monitor.check().checked == monitor.kept - 1, "what was kept before does not count"
    monitor.close()
    model(images)
    assert monitor.passes == before.passes + 9 and not model._forward_pre_hooks


def test_a_background_thread_checks_while_several_threads_run_the_model():
    model, batch = small_model(), smooth_images(2)
    with monitored(model, every=4, tolerance=10.0, background=True) as monitor:
        threads = [
            threading.Thread(target=lambda: [model(batch) for _ in range(10)]) for _ in range(4)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for _ in range(200):
            if monitor.state.checked + monitor.state.dropped == 10:
                break
            threading.Event().wait(0.05)
        state = monitor.state
    assert state.passes == 40 and state.kept == state.checked + state.dropped == 10
    assert state.holds and state.exceeded == 0 and state.largest_change > 0.0
    assert "bmfa-monitor" not in {one.name for one in threading.enumerate()}


def test_a_check_that_fails_ends_the_monitor_and_not_the_service():
    def measure(reference, output):
        raise ArithmeticError("no number")

    model = small_model()
    monitor = monitored(model, measure=measure)
    model(smooth_images(1))
    with pytest.warns(UserWarning, match="no longer monitored: ArithmeticError: no number"):
        monitor.run_in_background().join(10.0)
    assert "ArithmeticError" in monitor.state.failure and not model._forward_pre_hooks
    monitor = monitored(model, measure=measure)
    model(smooth_images(1))
    with pytest.raises(ArithmeticError, match="no number"):
        monitor.check()


def test_the_state_is_flat_json_and_copies_are_not_monitored():
    monitor = monitored()
    shift(monitor)
    state = json.loads(monitor.state.to_json())
    assert state == monitor.state.to_dict()
    assert all(isinstance(one, (int, float, str)) for one in state.values())
    assert repr(monitor).startswith(
        "Monitor(every=1, MonitorState(holds, 1 of 1 inputs beyond 1e-06"
    )
    for other in (copy.deepcopy(monitor.model), pickle.loads(pickle.dumps(monitor.model))):
        other(smooth_images(1))
    assert monitor.passes == 1


def test_arguments_are_checked():
    model = bmfa.patch(small_model(), **TILES)
    for options, words in (
        ({"every": 0}, "every is 0"),
        ({"tolerance": 0.0}, "tolerance is 0"),
        ({"allowed": 1.0}, "allowed is 1"),
        ({"level": 0}, "level is 0"),
        ({"action": "stop"}, "action is 'stop'"),
        ({"measure": "psnr"}, "'psnr'"),
        ({"seed": -1}, "seed is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            bmfa.monitor(model, **options)
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match="not patched"):
        bmfa.monitor(small_model())
    with pytest.raises(ValueError, match=r"share is 0\.1"):
        monitored().passes_to_alarm(0.1)
