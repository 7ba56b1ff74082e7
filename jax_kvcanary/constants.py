"""Numbers and enumerations that every backend shares (the contract's section on constants).

Their C++ twins stand in ``ffi/include/kvcanary``; ``tests/test_package.py`` compares the two through the native module.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

#: Starting value of every chain: the first token of a request has this as its predecessor's hash, once hashed.
CANARY_CHAIN_ANCHOR = 0xC0FFEE1234567890

#: Bytes of one record: four int64 fields (token, position, prev_hash, real_kv_hash).
CANARY_SLOT_BYTES = 32

#: int64 fields of one row of the violation ring.
VIOLATION_FIELDS = 8

#: Request row 0 of ``req_to_token`` pads a batch; it contributes nothing to a plan.
REQ_POOL_IDX_PADDING = 0

#: KV slot 0 takes the dummy writes of padded tokens; the content of its record is unspecified.
TOKEN_TO_KV_SLOT_PADDING = 0

#: Real-KV sources that one endpoint can fold into a record.
MAX_REAL_KV_SOURCES = 4

#: Bytes of a token that ``RealKvHashMode.PARTIAL`` reads, at most, from each source.
PARTIAL_READ_BYTES = 16

#: Every byte of a record that nothing has written, and of one whose slot was released.
FRESH_RECORD_BYTE = 0xFF

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class PoolKind(IntEnum):
    """The attention regime that a canary group belongs to.

    ``FULL`` covers every position of a request, ``SWA`` the last ``swa_window_size`` of them in a pool of its own.
    """

    FULL = 0
    SWA = 1


class RealKvHashMode(IntEnum):
    """How many bytes of a slot's real KV go into its record: none, the first 16 of each source, or all."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


class CanaryLaunchTag(IntEnum):
    """Which launch wrote a row of the log: phase, half of the pool, and group."""

    HEAD_K_FULL = 0
    HEAD_V_FULL = 1
    TAIL_K_FULL = 2
    TAIL_V_FULL = 3
    SWEEP_K_FULL = 4
    SWEEP_V_FULL = 5
    HEAD_K_SWA = 6
    HEAD_V_SWA = 7
    TAIL_K_SWA = 8
    TAIL_V_SWA = 9
    SWEEP_K_SWA = 10
    SWEEP_V_SWA = 11


NUM_LAUNCH_TAGS = len(CanaryLaunchTag)


class FailReason(IntFlag):
    """Bits of a violation's reasons. One row can carry several."""

    VERIFY_CHAIN_HASH_MISMATCH = 1
    VERIFY_POSITION_MISMATCH = 2
    VERIFY_REAL_KV_HASH_MISMATCH = 4
    WRITE_TOKEN_MISMATCH = 8
    WRITE_POSITION_MISMATCH = 16
    VERIFY_TOKEN_MISMATCH = 32
    SLOT_OUT_OF_RANGE = 64


#: Columns of ``fail_reason_counters``: the bits above, and one spare so that a row is 32 bytes.
FAIL_REASON_COLUMNS = 8
