"""Reading compiled programs: copies as large as a canary buffer, and the canary's custom calls."""

from __future__ import annotations

import math
import re

import jax_kvcanary as kvc

NUM_SLOTS = 1021

#: Bytes of a canary buffer; a KV layer of the pools that are looked at is no smaller.
BUFFER_SIZE = NUM_SLOTS * kvc.CANARY_SLOT_BYTES

COPYING = {
    "bitcast-convert",
    "concatenate",
    "convert",
    "copy",
    "copy-start",
    "dynamic-slice",
    "slice",
    "transpose",
}
WORD_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.*?) (?P<op>[a-z][\w\-]*)\(", re.MULTILINE)
ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")


def large_copies(text):
    """Instructions whose result is another arrangement of bytes, as large as a canary buffer."""
    found = []
    for instruction in INSTRUCTION.finditer(text):
        sizes = [
            math.prod(int(dim) for dim in array["dims"].split(",") if dim) * WORD_BYTES.get(array["dtype"], 8)
            for array in ARRAY.finditer(instruction["type"])
        ]
        if instruction["op"] in COPYING and max(sizes, default=0) >= BUFFER_SIZE:
            found.append(instruction[0].strip())
    return found


def custom_calls(text):
    """How often a program names each of the canary's targets."""
    return [len(re.findall(f'custom_call_target="{target}"', text)) for target in ("kvcanary_verify", "kvcanary_write")]
