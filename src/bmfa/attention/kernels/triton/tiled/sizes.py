"""How tiles and representatives are spread over programs, and the kernels' pinned settings."""

from dataclasses import dataclass

SIDE, GROUP = 8, 2
GAP_CAP = 4.0
# 2^100 a hundred thousand times, and 2^-100, are numbers still.
PLAIN = 100.0
# Pinned, not tuned at run time: columns of a scoring program, mean tiles in one step of attention,
# rows of the first-order matrix that one program adds up.
TILES, COARSE, STRIP = 16, 64, 16
# Warps (for head dims up to 64; twice as many above) and pipeline stages of each kernel.
CONFIGURATION = {
    "pool": (4, 3),
    "score": (4, 3),
    "residual": (4, 3),
    "attend": (4, 3),
    "certify": (4, 3),
}
# Programs that keep a large card busy, and the shares of k and v that scratch memory may take.
BUSY = 512
ROWS_SHARE, PARTS_SHARE = 0.10, 0.035


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call."""

    heads: int  # of all pictures
    tiles: int
    across: int
    groups: int
    pooled: int  # tiles of one pooling program
    scored: int  # tiles of one scoring program
    rows: int  # representatives at once
    block: int  # representatives of one program
    share: int  # tiles of one residual program
    few: bool  # too few tiles for long loops to fill the card

    @classmethod
    def of(cls, heads: int, height: int, width: int, dim: int, size: int) -> "Sizes":
        """For (heads, height width, dim) keys and values of `size` bytes a number."""
        down, across = -(-height // SIDE), -(-width // SIDE)
        tiles = down * across
        groups = -(-tiles // GROUP)
        room = 2 * height * width * dim * size  # bytes of k and v of one head
        few = tiles * heads < 2 * BUSY
        pooled, scored = (4, 2) if few else (8, TILES)
        # energy (4 bytes) and gap (2 bytes) of every representative and tile
        chunks = -(-6 * groups * tiles // max(1, int(ROWS_SHARE * room)))
        chunks = max(1, min(chunks, groups // 64))
        rows = -(-groups // chunks)
        block = 64 if rows > 32 else 32 if rows > 16 else 16
        programs = heads * -(-rows // block)
        parts = min(BUSY // programs, int(PARTS_SHARE * room) // (size * rows * dim))
        step = TILES // 2 if few else TILES
        share = step * -(-tiles // (step * max(1, parts)))
        return cls(heads, tiles, across, groups, pooled, scored, rows, block, share, few)
