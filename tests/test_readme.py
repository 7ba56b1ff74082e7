"""The README's Python is run, in order, as one program."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, str(README), "exec"), names)
        if number == 0:
            counters = names["kvc"].to_int64(names["state"].device_state.slot_run_counters)
            # Six tokens written, and the prefixes 0 to 5 verified, by each of the four launches.
            assert counters.tolist() == [6 + 15] * 4 + [0] * 8
    names["monitor"].flush(names["state"])
    assert names["monitor"].violations == ()


def test_the_report_in_the_readme_is_what_a_violation_prints():
    from jax_kvcanary import CanaryLaunchTag, FailReason, Violation

    shown = re.search(r"```text\n(.*?)\n```", README.read_text(encoding="utf-8"), flags=re.DOTALL).group(1)
    reasons = FailReason.VERIFY_CHAIN_HASH_MISMATCH | FailReason.VERIFY_POSITION_MISMATCH
    violation = Violation(CanaryLaunchTag.TAIL_K_FULL, reasons, 7, 3, 11, -1, 0x0123456789ABCDEF, 0xFEDCBA9876543210, 41, 41, 2, (9, 12))
    assert str(violation) == shown


def test_every_configuration_value_is_documented():
    import dataclasses

    from jax_kvcanary import CanaryConfig
    from jax_kvcanary.config import _ENV_FIELDS

    text = README.read_text(encoding="utf-8")
    for field in dataclasses.fields(CanaryConfig):
        assert f"| `{field.name}` |" in text
    for variable in _ENV_FIELDS:
        assert f"`KVCANARY_{variable}`" in text


def test_no_table_has_a_row_twice():
    first_cells = []
    for line in [*README.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            first_cells.append(line.split("|")[1])
        else:
            assert len(first_cells) == len(set(first_cells)), first_cells
            first_cells = []
