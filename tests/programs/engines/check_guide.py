"""The blocks of README.engines.md work, and the Trainer goes on as in one go."""

import os
import re
from pathlib import Path

import pytest

from zcrecord import load_record

PAGE = Path(__file__).resolve().parents[3] / "zcrecord" / "frameworks" / "README.engines.md"


def test_blocks_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], str(PAGE), "exec", dont_inherit=True), names)
    resumed = [load_record(f"gpt2/checkpoint-4/{name}.zcr").content_digest() for name in ("model", "optimizer")]
    os.rename("gpt2", "resumed")
    names["run"](4).train()  # type: ignore[operator]
    assert resumed == [load_record(f"gpt2/checkpoint-4/{name}.zcr").content_digest() for name in ("model", "optimizer")]
    assert not list(Path("gpt2").rglob("*.safetensors")) and not list(Path("gpt2").rglob("optimizer.pt"))
