"""The registry of methods agrees with the parsers, and every default list is registered."""

from bmfa.evidence import methods
from bmfa.evidence.methods import METHODS, find_mark, find_method, is_kind, names
from bmfa.merging import POLICY_NAMES
from bmfa.trees.rules.names import MAKERS as RULES


def test_every_rule_and_reduction_that_is_parsed_is_registered() -> None:
    assert set(names(["rule"])) == {*RULES, "random-quadrants", "global-mean"}
    assert set(names(["reduction"])) == set(POLICY_NAMES)


def test_peers_of_the_benchmark_are_registered() -> None:
    from bmfa.evidence.bench.peers import PEERS

    assert set(PEERS) <= set(names(["bench"]))


def test_default_methods_are_registered_and_have_a_mark() -> None:
    for name in (*methods.DEFAULT_METHODS, *methods.COMPARABLE_METHODS):
        assert find_method(name) is not None and find_mark(name) is not None, name


def test_a_reduction_is_no_rule() -> None:
    assert is_kind("dct2:0.9", "reduction")
    assert not is_kind("dct2:0.9", "rule")
    assert find_method("unknown:1") is None
    assert not is_kind("unknown:1", "rule", "reduction", "summary", "full", "bench")


def test_look_ahead_of_any_depth_is_one_method() -> None:
    assert find_method("gamma-h4:0.005") is METHODS["gamma-h2"]
    assert find_method("gamma-hx:0.005") is None


def test_every_method_is_described_once() -> None:
    titles = [method.title for method in METHODS.values()]
    assert len(set(titles)) == len(titles)
    assert all(method.description and method.reads for method in METHODS.values())
