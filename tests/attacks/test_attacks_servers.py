"""Every hostile server of the catalogue is refused by the right error, in little memory, whatever is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import servers
from attacks.catalogue import rules_on_the_page
from attacks.running import faults

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="platform: needs fork and /proc")


@pytest.mark.slow
def test_every_hostile_server_is_refused_in_little_memory(tmp_path: Path) -> None:
    assert not faults(servers, tmp_path, 6)


def test_every_rule_of_an_answer_that_is_written_down_has_an_attack() -> None:
    assert {rule for attack in servers.ATTACKS for rule in attack.rules} == set(rules_on_the_page("W"))
