"""No attacks: what `attacks.running` has to notice, so that no answer of the catalogue is taken on trust."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np

import zcrecord
from attacks.catalogue import Door, attack, file

LONGEST = 3.0


def door(act: Callable[[], object]) -> Door:
    return lambda _: act


DOORS: dict[str, Door] = {
    "killed": door(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "ends": door(lambda: os._exit(3)),
    "80 MiB": door(lambda: np.ones(80 << 20, np.uint8).max()),
    "8 GiB": door(lambda: bytearray(8 << 30)),
    "refuses": door(lambda: zcrecord.load_record(b"x")),
    "sleeps": door(lambda: time.sleep(60)),
    "accepts": door(lambda: None),
}
ATTACKS = (attack("probe", "", file(bytes), None),)
