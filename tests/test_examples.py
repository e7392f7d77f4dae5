"""The example scripts run on a CPU without a network and print what their text promises."""

import re
import runpy
import socket
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"

# Patterns that the output of each script must contain, in this order.
EXPECTED = {
    "measure.py": (
        r"corner: 86\.5% of the softmax mass",
        r"gap G = F - M +1\.8925",
        r"optimal:0\.001 +10 leaves, error 0\.0000",
        r"centre: 86\.5%",
        r"refinement score +0\.0000",
        r"gamma:0\.005 +1 leaves, error 1\.8925",
        r"optimal:0\.001 +40 leaves, error 0\.0000",
    ),
    "screen_image.py": (
        r"screened attention: (\w[\w, ]+)\n.*full attention: +\1\n",
        r"Leaves: 12\.\d% of the tokens; KL of attention: 0\.03",
        r"one tree on 16x16, optimal:0\.002",
        r"(?:\n  (?:[ \d]{2}\S ?){16}){16}",
    ),
    "speed_up_model.py": (
        r"full attention +\d+ ms",
        r"leaves=0\.05 +\d+ ms, \d+\.\dx, features move by 0\.\d+%",
        r"bit-identical after unpatch: True",
    ),
    "merge_tokens.py": (
        r"full +257",
        r"tome:12 +161 +\d+% +\d\.\de",
        r"free-energy:20 +97 ",
    ),
    "read_certificate.py": (
        r"\d+\.\d% of the tiles expanded",
        r"true error of the output: 1\.\d+%",
        r"measured by probes: 1\.\d+% \+- 0\.\d+%",
        r"certificate: max 0\.\d+",
        r"bound on E: max 0\.0500",
        r"distance to the exact output: max 0\.\d+, certificate 0\.\d",
    ),
}


def test_examples_run_and_print_what_they_promise(monkeypatch, capsys, tmp_path):
    def refuse(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    for name, patterns in EXPECTED.items():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        output = capsys.readouterr().out
        assert re.search("(?s:.*?)".join(patterns), output), f"{name} printed\n{output}"
    assert list(tmp_path.iterdir()) == []
