"""Every hostile server of the catalogue is refused by the right error, in little memory, whatever is asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from exhaustive import some

from attacks import servers
from attacks.catalogue import wrong
from attacks.running import answers

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="platform: needs fork and /proc")


@pytest.mark.slow
def test_every_hostile_server_is_refused_in_little_memory(tmp_path: Path) -> None:
    found = {attack.name: attack for attack in servers.ATTACKS}
    assert len(found) == len(servers.ATTACKS), "two attacks have one name"
    chosen = some(list(found), 6)
    told = answers(servers.__name__, tmp_path, names=chosen)
    assert len(told) == len(chosen) * len(servers.DOORS)
    faults = [fault for answer in told if (fault := wrong(found[answer.attack], answer))]
    assert not faults, "\n".join(faults)


def test_every_rule_of_an_answer_that_is_written_down_has_an_attack() -> None:
    page = (ROOT / "schema" / "SECURITY.md").read_text(encoding="utf-8")
    written = re.findall(r"^\| (W\d+) \|", page, re.MULTILINE)
    assert written == [f"W{i}" for i in range(1, len(written) + 1)]
    assert {rule for attack in servers.ATTACKS for rule in attack.rules} == set(written)
