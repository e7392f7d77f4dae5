"""Sparse attention of other packages: what they are given, and where their output lands."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa.evidence.bench import attention as attention_bench
from bmfa.evidence.bench import peers
from bmfa.evidence.bench.inputs import InputSource
from bmfa.grid import Grid

NAMES = {"pisa": "piecewise_sparse_attention", "pisa-0th": "piecewise_sparse_attention_0th"}
OPTIONS = {
    "pisa": {"density": 0.3, "block_size": 64, "use_bias": True},
    "pisa-0th": {"density": 0.3, "block_size": 64},
}


class Package:
    """Stands in for piecewise_attn: exact attention, or within blocks of 64 tokens in a row alone."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.options: dict[str, object] = {}
        self.own_block_alone = False

    def attend(self, q, k, v, **options):
        assert all(x.is_contiguous() for x in (q, k, v))
        self.tokens, self.options = [q, k, v], options
        if not self.own_block_alone:
            return scaled_dot_product_attention(q, k, v)
        blocks = zip(*(x.split(options["block_size"], dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*block) for block in blocks], 2)


@pytest.fixture
def package(monkeypatch) -> Package:
    made = Package()
    module = ModuleType("piecewise_attn")
    module.__spec__ = ModuleSpec("piecewise_attn", None)
    for name in NAMES.values():
        setattr(module, name, made.attend)
    monkeypatch.setitem(sys.modules, "piecewise_attn", module)
    return made


def tokens_of(grid: Grid, prefix: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(grid.size)
    shape = (3, 2, 2, prefix + grid.size, 16)
    return torch.randn(shape, dtype=torch.float64, generator=generator).unbind()


def test_exact_attention_of_a_peer_is_exact_in_our_order(package):
    for name in NAMES:
        for grid, prefix in (
            (Grid(16, 16), 1),
            (Grid(14, 14), 0),
            (Grid(8, 24), 5),
            (Grid(1, 1), 1),
        ):
            q, k, v = tokens_of(grid, prefix)
            attend, _ = peers.PEERS[name].make(grid, prefix, 0.3)
            for _ in range(2):
                torch.testing.assert_close(attend(q, k, v), scaled_dot_product_attention(q, k, v))
            assert package.options == OPTIONS[name]


def test_blocks_of_a_peer_are_tiles_and_prefix_tokens_come_last(package):
    package.own_block_alone = True
    grid = Grid(16, 32)
    for prefix in (0, 1, 4):
        q, k, v = tokens_of(grid, prefix)
        attend, _ = peers.PEERS["pisa"].make(grid, prefix, 0.3)
        row, column = torch.arange(grid.size) // 32, torch.arange(grid.size) % 32
        tile = torch.cat((torch.full((prefix,), -1), row // 8 * 4 + column // 8))
        wanted = scaled_dot_product_attention(q, k, v, attn_mask=tile[:, None] == tile)
        torch.testing.assert_close(attend(q, k, v), wanted)
        for seen, given in zip(package.tokens, (q, k, v), strict=True):
            assert torch.equal(seen[:, :, grid.size :], given[:, :, :prefix])
        prepared = attend.bind(q, k, v)
        seen, package.tokens = package.tokens, []
        torch.testing.assert_close(prepared(), wanted[:, :, attend.order])
        assert all(map(torch.equal, package.tokens, seen))


def test_density_counts_whole_blocks():
    for grid, prefix, share, kept in (
        (Grid(128, 128), 1, 0.05, 12 / 257),
        (Grid(128, 128), 0, 0.05, 12 / 256),
        (Grid(256, 256), 1, 0.3, 307 / 1025),
        (Grid(14, 14), 1, 0.1, 1 / 4),
    ):
        for name in NAMES:
            assert peers.PEERS[name].make(grid, prefix, share)[1] == kept


def test_an_installed_package_is_timed_at_its_own_shares_and_an_absent_one_noted(
    package, monkeypatch
):
    present, absent = peers.available()
    assert {"pisa", "pisa-0th"} <= set(present) and not {"pisa", "pisa-0th"} & set(absent)
    names = [f"{name}:{share}" for name in NAMES for share in (0.05, 0.1, 0.2, 0.3)]
    assert list(peers.calls(list(NAMES), Grid(8, 8), 1)) == names
    monkeypatch.setattr(peers, "is_installed", lambda name: False)
    assert peers.available()[0] == []
    assert peers.available()[1]["pisa"] == "piecewise_attn is not installed"


def test_a_bench_compares_with_the_package_and_notes_what_it_lacks(package, monkeypatch):
    monkeypatch.delattr(sys.modules["piecewise_attn"], NAMES["pisa-0th"])
    options = {"tokens": [256], "methods": ["tiles:1"], "repeats": 1}
    record = attention_bench.run(InputSource(), **options)
    rows = {row["method"]: row for row in record.rows}
    for share in (0.05, 0.1, 0.2, 0.3):
        row = rows[f"pisa:{share}"]
        assert row["density_percent"] == pytest.approx(100 / 5)
        # The stand-in is dense attention: off by float32's rounding, as dense attention is.
        assert row["error_l2_percent"] < 100 * 64 * torch.finfo(torch.float32).eps
        assert row["milliseconds"] > 0
    assert not any(method.startswith("pisa-0th") for method in rows)
    assert NAMES["pisa-0th"] in record.settings["absent"]["pisa-0th:0.05 at 256"]
